"""GEMM kernels without a GPU: what is a kernel, and what is tried.

What kernels compute is in test_cuda_gemm_on_cpu.py, their text and what the compiler makes of it in
test_cuda_gemm_compiled.py.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx.backend.cuda import codegen, kernel_config
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, KernelConfig
from qsync_fx.backend.cuda.problem import GemmProblem
from qsync_fx.backend.cuda.selection import (
    candidates,
    candidates as tried,
    constraints,
    select,
)
from qsync_fx.errors import OptionError

INT8 = GemmProblem(
    4096, 4096, 4096, "int8", "int8", "bf16", a_scale="channel", b_scale="channel", bias=True
)
BF16 = GemmProblem(4096, 4096, 4096, "bf16", "bf16", "bf16")


def kernels(problem: GemmProblem, arch: str) -> tuple[KernelConfig, ...]:
    return tried.candidates(problem, arch)  # type: ignore[arg-type]


TURING, AMPERE, HOPPER = (kernels(INT8, arch)[0] for arch in ("sm_75", "sm_80", "sm_90a"))
STREAM_K = next(config for config in kernels(INT8, "sm_80") if config.order == "stream_k")
TF32 = kernels(GemmProblem(4096, 4096, 4096, "tf32", "tf32", "fp32"), "sm_90a")[0]
SIMT = kernels(GemmProblem(4096, 4096, 4096, "fp32", "fp32", "fp32"), "sm_80")[0]


@st.composite
def problems(draw: st.DrawFn, unit: int = 1) -> GemmProblem:
    """Problems in all formats and layouts, with sizes that are multiples of `unit`."""
    a, b = draw(st.sampled_from(sorted(kernel_config.OPERANDS)))
    size = st.integers(1, 20000 // unit).map(lambda value: value * unit)
    return GemmProblem(
        draw(size),
        draw(size),
        draw(size),
        a,
        b,
        draw(st.sampled_from(kernel_config.OUTPUTS)),
        draw(st.sampled_from(["row", "column"])),
        draw(st.sampled_from(["row", "column"])),
        draw(st.sampled_from(["none", "tensor", "channel"])),
        draw(st.sampled_from(["none", "tensor", "channel"])),
        draw(st.booleans()),
    )


@given(problems(), st.sampled_from(ARCHITECTURES))
def test_candidates_are_kernels_that_serve_in_a_stable_order(
    problem: GemmProblem, arch: str
) -> None:
    found = kernels(problem, arch)
    assert found == kernels(problem, arch)
    assert len(set(found)) == len(found) == len({config.name for config in found})
    for config in found:
        assert candidates.problems(config) == []
        assert select.serves(config, problem) is None
        assert config.arch == arch


@given(problems(unit=16), st.sampled_from(ARCHITECTURES))
def test_eight_to_twelve_wherever_the_tensor_cores_have_the_formats_and_layouts(
    problem: GemmProblem, arch: str
) -> None:
    first = kernel_config.OPERANDS[problem.a, problem.b]
    k_major = (problem.a_major, problem.b_major) == ("row", "column")
    only_k_major = kernel_config.size_of(problem.a) == 1
    if ARCHITECTURES.index(arch) < ARCHITECTURES.index(first) or (only_k_major and not k_major):
        assert kernels(problem, arch) == ()
    else:
        assert 8 <= len(kernels(problem, arch)) <= 12


def test_an_unknown_architecture_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="sm_90a"):
        kernels(BF16, "sm_90")


def test_tiles_suit_the_size() -> None:
    """A batch of 16 rows is not computed in tiles of 128, a large product not in tiles of 64."""
    for arch in ARCHITECTURES:
        few, many = (kernels(dataclasses.replace(INT8, m=m), arch)[0] for m in (16, 8192))
        assert few.tile[0] * few.tile[1] < many.tile[0] * many.tile[1] or few.order == "stream_k"


@pytest.mark.parametrize(
    ("config", "changes", "rule"),
    [
        (AMPERE, {"arch": "sm_90"}, "arch"),
        (AMPERE, {"operation": "conv"}, "operation"),
        (AMPERE, {"tile": (128, 128)}, "shapes"),
        (AMPERE, {"tile": [128, 128, 64]}, "shapes"),
        (AMPERE, {"warp": (64, 0, 64)}, "shapes"),
        (AMPERE, {"warp": ()}, "shapes"),
        (AMPERE, {"b": "bf16"}, "operands"),
        (AMPERE, {"a": "int4"}, "operands"),
        (AMPERE, {"out": "int8"}, "output"),
        (AMPERE, {"a_major": "diagonal"}, "layouts"),
        (AMPERE, {"a_scale": "tensor"}, "scales"),
        (AMPERE, {"a_scale": "none"}, "scales"),
        (AMPERE, {"schedule": "persistent"}, "schedule"),
        (AMPERE, {"swizzle": 3}, "swizzle"),
        (AMPERE, {"alignment": 3}, "alignment"),
        (AMPERE, {"stages": -1}, "stages"),
        (TURING, {"a": "bf16", "b": "bf16"}, "since"),
        (AMPERE, {"unit": "simt"}, "unit"),
        (AMPERE, {"a_major": "column"}, "K-major"),
        (HOPPER, {"b_major": "row"}, "K-major"),
        (AMPERE, {"schedule": "multistage_fast"}, "fast"),
        (AMPERE, {"out": "fp32"}, "wide"),
        (AMPERE, {"warp": None}, "names"),
        (AMPERE, {"cluster": (1, 1, 1)}, "names"),
        (AMPERE, {"warp": (96, 64, 64)}, "warp divides tile"),
        (AMPERE, {"warp": (64, 64, 32)}, "warp divides tile"),
        (AMPERE, {"instruction": (16, 8, 16)}, "instruction"),
        (AMPERE, {"tile": (128, 128, 32), "warp": (64, 64, 32)}, "iterations"),
        (AMPERE, {"tile": (128, 128, 256), "warp": (64, 64, 256)}, "rows of memory"),
        (SIMT, {"tile": (128, 128, 16), "warp": (32, 64, 16)}, "simt tile"),
        (SIMT, {"alignment": 4}, "simt tile"),
        (AMPERE, {"warp": (16, 16, 64)}, "warps"),
        (AMPERE, {"tile": (32, 128, 64), "warp": (16, 16, 64)}, "loads"),
        (AMPERE, {"warp": (128, 128, 64)}, "registers"),
        (AMPERE, {"order": "persistent"}, "order"),
        (STREAM_K, {"swizzle": 4}, "order"),
        (AMPERE, {"schedule": "pipelined"}, "pipeline"),
        (TURING, {"schedule": "multistage"}, "pipeline"),
        (TURING, {"stages": 3}, "stages of the pipeline"),
        (AMPERE, {"stages": 2}, "stages of the pipeline"),
        (SIMT, {"a": "bf16", "b": "bf16", "alignment": 1}, "asynchronous copies"),
        (AMPERE, {"alignment": 8}, "aligned bytes"),
        (AMPERE, {"arch": "sm_86", "stages": 8}, "shared memory"),
        (AMPERE, {"a": "fp8", "b": "fp8", "arch": "sm_90a"}, "fp8 by wgmma"),
        (HOPPER, {"arch": "sm_89"}, "hopper"),
        (HOPPER, {"warp": (64, 64, 128)}, "wgmma"),
        (HOPPER, {"cluster": (4, 4, 1)}, "cluster"),
        (HOPPER, {"cluster": None}, "cluster"),
        (HOPPER, {"tile": (64, 256, 128)}, "tile m"),
        (HOPPER, {"tile": (128, 512, 128)}, "tile n"),
        (HOPPER, {"tile": (128, 256, 64)}, "tile k"),
        (HOPPER, {"out_alignment": 4}, "TMA"),
        (HOPPER, {"tile": (256, 256, 128)}, "registers"),
        (HOPPER, {"a": "fp8", "b": "fp8"}, "registers"),
        (TF32, {"a_major": "column"}, "tf32 across k"),
        (TF32, {"b_major": "row"}, "tf32 across k"),
        (HOPPER, {"order": "identity"}, "order"),
        (HOPPER, {"schedule": "pingpong", "tile": (64, 256, 128), "order": "stream_k"}, "order"),
        (HOPPER, {"stages": 5}, "shared memory"),
        (HOPPER, {"stages": 1}, "stages of the pipeline"),
    ],
    ids=str,
)
def test_a_broken_configuration_is_named(
    config: KernelConfig, changes: dict[str, object], rule: str
) -> None:
    assert candidates.problems(config) == []
    broken = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    assert rule in {found.name for found in constraints.GEMM.broken(broken)}
    assert len(candidates.problems(broken)) == len(constraints.GEMM.broken(broken))


def test_every_rule_can_be_broken() -> None:
    """What the cases above break is every rule there is."""
    (cases,) = [
        mark.args[1]
        for mark in test_a_broken_configuration_is_named.pytestmark
        if mark.name == "parametrize"
    ]  # type: ignore[attr-defined]
    assert {
        rule.name
        for table in (
            constraints.GEMM.plain,
            constraints.GEMM.both,
            constraints.GEMM.cutlass_2,
            constraints.GEMM.cutlass_3,
        )
        for rule in table
    } - {rule for _, _, rule in cases} == set()


ANY_SHAPE = st.one_of(
    st.none(),
    st.tuples(*[st.integers(-1, 2048)] * 3),
    st.sampled_from([(64, 64, 32), (128, 128, 64)]),
)


@settings(max_examples=300)
@given(
    st.sampled_from([TURING, AMPERE, HOPPER, STREAM_K, SIMT]),
    st.fixed_dictionaries(
        {},
        optional={
            "arch": st.sampled_from([*ARCHITECTURES, "sm_100", ""]),
            "a": st.sampled_from(["int8", "fp16", "tf32", "fp8", "fp32", "fp8_e5m2", "fp64", ""]),
            "b": st.sampled_from(["int8", "fp16", "tf32", "fp8", "fp32", "nothing"]),
            "out": st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
            "tile": ANY_SHAPE,
            "warp": ANY_SHAPE,
            "instruction": ANY_SHAPE,
            "cluster": ANY_SHAPE,
            "stages": st.integers(-2, 40),
            "schedule": st.sampled_from(
                ["multistage", "pipelined", "cooperative", "pingpong", "pingpong_fast", "x"]
            ),
            "order": st.sampled_from(["identity", "stream_k", "persistent", ""]),
            "alignment": st.integers(0, 32),
            "out_alignment": st.integers(0, 32),
            "unit": st.sampled_from(["tensor", "simt", "none"]),
        },
    ),
)
def test_any_configuration_has_an_answer(config: KernelConfig, changes: dict[str, object]) -> None:
    """Rules say what is wrong with whatever users write; what they find nothing wrong with has a
    source.
    """
    changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    if not candidates.problems(changed):
        assert changed.name in codegen.gemm_source(changed).source


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"a": "fp8"}, "it multiplies int8 by int8, not fp8 by int8"),
        ({"out": "fp16"}, "its output is bf16, not fp16"),
        (
            {"b_major": "row"},
            "it reads row-major a and column-major b, not row-major a and row-major b",
        ),
        ({"k": 100}, "k = 100 is not a multiple of 16"),
        ({"n": 100}, "n = 100 is not a multiple of 8"),
        ({"k": 1 << 17}, "k = 131072 is above 131071: sums may overflow 32 bits"),
        ({"n": 1 << 24}, "n = 16777216 has more than 65535 tiles of 128"),
        ({"m": 0}, "sizes must be from 1 to 2147483647"),
        ({"a_scale": "none", "b_scale": "tensor", "bias": False}, None),
        ({"m": 1, "n": 8, "k": 16}, None),
    ],
)
def test_why_a_kernel_does_not_serve(changes: dict[str, object], reason: str | None) -> None:
    assert select.serves(AMPERE, dataclasses.replace(INT8, **changes)) == reason  # type: ignore[arg-type]


def test_kernels_without_scales_or_bias_do_not_serve_problems_with_them() -> None:
    plain = dataclasses.replace(AMPERE, a_scale="none", b_scale="none", bias=False)
    assert select.serves(plain, INT8) == "it reads no scales"
    assert (
        select.serves(plain, dataclasses.replace(INT8, a_scale="none", b_scale="none"))
        == "it adds no bias"
    )


def test_users_add_kernels() -> None:
    own = dataclasses.replace(AMPERE, stages=6)
    assert own not in kernels(INT8, "sm_80")
    try:
        assert tried.add(own) == tried.add(own) == own
        assert kernels(INT8, "sm_80")[-1] == own
        assert own in tried.all_configs("sm_80")
        assert own not in kernels(BF16, "sm_80")
        assert own not in kernels(INT8, "sm_86")
    finally:
        tried.remove(own)
    assert own not in kernels(INT8, "sm_80")


def test_a_kernel_that_breaks_rules_is_refused_with_all_of_them() -> None:
    with pytest.raises(OptionError) as caught:
        tried.add(dataclasses.replace(AMPERE, stages=40, swizzle=5))
    assert "swizzle" in str(caught.value) and "stages" in str(caught.value)
