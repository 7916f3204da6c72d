"""GEMM kernels without a GPU: valid configurations and candidates.

test_cuda_gemm_on_cpu.py tests their results, test_cuda_gemm_compiled.py their source and compiled
kernels.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx.backend.cuda import codegen, kernel_config
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, KernelConfig
from qsync_fx.backend.cuda.problem import GemmProblem
from qsync_fx.backend.cuda.selection import (
    candidates as tried,
    constraints,
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
    """Draw a problem in any format and layout, with sizes that are multiples of `unit`."""
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
    configs = kernels(problem, arch)
    assert configs == kernels(problem, arch)
    assert len(set(configs)) == len(configs) == len({config.name for config in configs})
    for config in configs:
        assert constraints.problems(config) == []
        assert constraints.serves(config, problem) is None
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
    """Check that 16 rows use a smaller tile than 8192 rows, or stream-K."""
    for arch in ARCHITECTURES:
        few, many = (kernels(dataclasses.replace(INT8, m=m), arch)[0] for m in (16, 8192))
        assert few.tile[0] * few.tile[1] < many.tile[0] * many.tile[1] or few.order == "stream_k"


@pytest.mark.parametrize(
    ("config", "changes", "rule"),
    [
        (AMPERE, {"arch": "sm_90"}, "the architecture must be one of"),
        (AMPERE, {"operation": "conv"}, "the operation must be"),
        (AMPERE, {"tile": (128, 128)}, "three sizes"),
        (AMPERE, {"tile": [128, 128, 64]}, "three sizes"),
        (AMPERE, {"warp": (64, 0, 64)}, "three sizes"),
        (AMPERE, {"warp": ()}, "three sizes"),
        (AMPERE, {"b": "bf16"}, "there are kernels for"),
        (AMPERE, {"a": "int4"}, "there are kernels for"),
        (AMPERE, {"out": "int8"}, "the output must be"),
        (AMPERE, {"a_major": "diagonal"}, "row-major or column-major"),
        (AMPERE, {"a_scale": "tensor"}, "a kernel reads no scales"),
        (AMPERE, {"a_scale": "none"}, "a kernel reads no scales"),
        (AMPERE, {"schedule": "persistent"}, "the schedule must be"),
        (AMPERE, {"swizzle": 3}, "the swizzle must be"),
        (AMPERE, {"alignment": 3}, "alignments must be powers"),
        (AMPERE, {"stages": -1}, "at most 16 stages"),
        (TURING, {"a": "bf16", "b": "bf16"}, "must have tensor cores"),
        (AMPERE, {"unit": "simt"}, "fp32 needs the unit"),
        (AMPERE, {"a_major": "column"}, "contiguous along k: a row-major"),
        (HOPPER, {"b_major": "row"}, "contiguous along k: a row-major"),
        (AMPERE, {"schedule": "multistage_fast"}, "fast accumulation"),
        (AMPERE, {"out": "fp32"}, "at most 16 bytes"),
        (AMPERE, {"warp": None}, "needs warp and instruction"),
        (AMPERE, {"cluster": (1, 1, 1)}, "needs warp and instruction"),
        (AMPERE, {"warp": (96, 64, 64)}, "must divide the tile"),
        (AMPERE, {"warp": (64, 64, 32)}, "must divide the tile"),
        (AMPERE, {"instruction": (16, 8, 16)}, "the instruction must be"),
        (AMPERE, {"tile": (128, 128, 32), "warp": (64, 64, 32)}, "a multiple of the instruction"),
        (AMPERE, {"tile": (128, 128, 256), "warp": (64, 64, 256)}, "64 or 128 bytes along k"),
        (SIMT, {"tile": (128, 128, 16), "warp": (32, 64, 16)}, "simt tiles must"),
        (SIMT, {"alignment": 4}, "simt tiles must"),
        (AMPERE, {"warp": (16, 16, 64)}, "1 to 16 warps"),
        (AMPERE, {"tile": (32, 128, 64), "warp": (16, 16, 64)}, "divide evenly among threads"),
        (AMPERE, {"warp": (128, 128, 64)}, "must fit into registers"),
        (AMPERE, {"order": "persistent"}, "the tile order must be"),
        (STREAM_K, {"swizzle": 4}, "the tile order must be"),
        (AMPERE, {"schedule": "pipelined"}, "needs the schedule pipelined"),
        (TURING, {"schedule": "multistage"}, "needs the schedule pipelined"),
        (TURING, {"stages": 3}, "needs two stages"),
        (AMPERE, {"stages": 2}, "needs two stages"),
        (SIMT, {"a": "bf16", "b": "bf16", "alignment": 1}, "at least 4 bytes"),
        (AMPERE, {"alignment": 8}, "aligned to 16 bytes"),
        (AMPERE, {"arch": "sm_86", "stages": 8}, "fit into shared memory"),
        (AMPERE, {"a": "fp8", "b": "fp8", "arch": "sm_90a"}, "FP8 on sm_90a needs"),
        (HOPPER, {"arch": "sm_89"}, "a schedule of sm_90a"),
        (HOPPER, {"warp": (64, 64, 128)}, "no warp and instruction"),
        (HOPPER, {"cluster": (4, 4, 1)}, "a cluster must have"),
        (HOPPER, {"cluster": None}, "a cluster must have"),
        (HOPPER, {"tile": (64, 256, 128)}, "m of the tile must be"),
        (HOPPER, {"tile": (128, 512, 128)}, "n of the tile must be"),
        (HOPPER, {"tile": (128, 256, 64)}, "128 bytes along k"),
        (HOPPER, {"out_alignment": 4}, "TMA copies"),
        (HOPPER, {"tile": (256, 256, 128)}, "must fit into registers"),
        (HOPPER, {"a": "fp8", "b": "fp8"}, "must fit into registers"),
        (TF32, {"a_major": "column"}, "needs TF32 contiguous"),
        (TF32, {"b_major": "row"}, "needs TF32 contiguous"),
        (HOPPER, {"order": "identity"}, "the tile order must be"),
        (
            HOPPER,
            {"schedule": "pingpong", "tile": (64, 256, 128), "order": "stream_k"},
            "the tile order must be",
        ),
        (HOPPER, {"stages": 5}, "fit into shared memory"),
        (HOPPER, {"stages": 1}, "at least two stages"),
    ],
    ids=str,
)
def test_broken_rules_are_returned(
    config: KernelConfig, changes: dict[str, object], rule: str
) -> None:
    assert constraints.problems(config) == []
    broken = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    assert any(rule in sentence for sentence in constraints.problems(broken))


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
    """Check that the rules handle any configuration, and that each valid one has a source."""
    changed = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    if not constraints.problems(changed):
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
    assert constraints.serves(AMPERE, dataclasses.replace(INT8, **changes)) == reason  # type: ignore[arg-type]


def test_kernels_without_scales_or_bias_do_not_serve_problems_with_them() -> None:
    plain = dataclasses.replace(AMPERE, a_scale="none", b_scale="none", bias=False)
    assert constraints.serves(plain, INT8) == "it reads no scales"
    assert (
        constraints.serves(plain, dataclasses.replace(INT8, a_scale="none", b_scale="none"))
        == "it adds no bias"
    )


def test_users_add_kernels() -> None:
    custom = dataclasses.replace(AMPERE, stages=6)
    assert custom not in kernels(INT8, "sm_80")
    try:
        assert tried.add(custom) == tried.add(custom) == custom
        assert kernels(INT8, "sm_80")[-1] == custom
        assert custom in tried.all_configs("sm_80")
        assert custom not in kernels(BF16, "sm_80")
        assert custom not in kernels(INT8, "sm_86")
    finally:
        tried.remove(custom)
    assert custom not in kernels(INT8, "sm_80")


def test_a_kernel_that_breaks_rules_is_refused_with_all_of_them() -> None:
    with pytest.raises(OptionError) as caught:
        tried.add(dataclasses.replace(AMPERE, stages=40, swizzle=5))
    assert "swizzle" in str(caught.value) and "stages" in str(caught.value)
