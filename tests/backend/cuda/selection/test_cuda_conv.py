"""Convolution kernels without a GPU: what is a kernel, what is tried, what is served.

What kernels compute is in test_cuda_conv_on_cpu.py, what the compiler makes of them in
test_cuda_conv_compiled.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings, strategies as st

from qsync_fx.backend.cuda import codegen, kernel_config
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem
from qsync_fx.backend.cuda.selection import (
    candidates,
    candidates as tried,
    constraints,
    select,
)
from qsync_fx.backend.cuda.selection.candidate_tables import conv_candidates, conv_configs

RUNNING: tuple[Arch, ...] = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
FORMATS = [a for a, b in kernel_config.OPERANDS if a == b and not a.startswith("fp8")]
ALIGNED = {"int8": 16, "fp16": 8, "bf16": 8, "tf32": 4, "fp32": 1}
RESNET = ConvProblem(
    "fprop",
    64,
    56,
    56,
    64,
    64,
    3,
    3,
    (1, 1),
    (1, 1),
    (1, 1),
    "int8",
    "int8",
    "bf16",
    "tensor",
    "channel",
)

pair = st.tuples(st.integers(0, 5), st.integers(0, 5))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def problems(draw: st.DrawFn, unit: int = 1, **fixed: Any) -> ConvProblem:
    """Problems in all formats, with channels that are multiples of `unit`; also those whose filter
    is larger than the image.
    """
    fmt = fixed.pop("fmt", None) or draw(st.sampled_from(FORMATS))
    channels = st.integers(1, 1024 // unit).map(lambda value: value * unit)
    operation = draw(st.sampled_from(get_args(ConvOperation)))
    found = ConvProblem(
        operation,
        draw(st.integers(1, 64)),
        draw(st.integers(1, 64)),
        draw(st.integers(1, 64)),
        draw(channels),
        draw(channels),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 7)),
        draw(pair),
        draw(steps),
        draw(steps),
        fmt,
        fmt,
        draw(st.sampled_from(kernel_config.OUTPUTS)),
        draw(st.sampled_from(["none", "tensor"])),
        draw(st.sampled_from(["none", "tensor", "channel"])),
        operation == "fprop" and draw(st.booleans()),
    )
    return dataclasses.replace(found, **fixed)


@settings(max_examples=200)
@given(problem=problems(), arch=st.sampled_from(ARCHITECTURES))
def test_candidates_are_kernels_that_serve_in_a_stable_order(
    problem: ConvProblem, arch: Arch
) -> None:
    found = conv_candidates(problem, arch)
    assert found == conv_candidates(problem, arch)
    assert len({config.name for config in found}) == len(found)
    for config in found:
        assert candidates.problems(config) == []
        assert select.serves(config, problem) is None
        assert config.arch == arch
    assert tried.candidates(problem, arch)[: len(found)] == tuple(found)


@settings(max_examples=200)
@given(problem=problems(unit=16), arch=st.sampled_from(RUNNING))
def test_usual_problems_have_kernels(problem: ConvProblem, arch: Arch) -> None:
    """Where there is none, it is for a reason that is written down, and of the problem or the
    architecture.
    """
    assume(kernel_config.OPERANDS[problem.a, problem.b] <= arch)
    assume(min(problem.p, problem.q) >= 1)
    assume(problem.operation == "fprop" or problem.b_scale != "channel")
    assume(max(problem.r, problem.s) <= 32)
    count = len(conv_candidates(problem, arch))
    strided = problem.operation == "dgrad" and problem.stride != (1, 1)
    if (problem.a == "int8" and problem.operation != "fprop") or (
        strided and problem.dilation != (1, 1)
    ):
        assert count == 0
    else:
        assert 8 <= count <= 16


@pytest.mark.parametrize("arch", RUNNING)
def test_every_configuration_is_a_kernel_with_a_source(arch: Arch) -> None:
    found = list(conv_configs(arch))
    names = {config.name for config in found}
    assert len({config.digest for config in found}) == len(names)
    for config in dict.fromkeys(found):
        assert candidates.problems(config) == []
        unit = codegen.conv_source(config)
        assert unit.interface == "conv"
        assert unit.name in unit.source
        assert unit.heavy == ("conv_sm90" in unit.source) == codegen.conv_on_hopper(config)
        assert unit.opcode in ("FFMA", "HMMA", "IMMA", "HGMMA", "IGMMA")


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("arch", {"arch": "sm_42"}),
    ("arch", {"arch": "sm_70"}),
    ("operation", {"operation": "gemm"}),
    ("shapes", {"tile": (128, 128)}),
    ("shapes", {"tile": (128, 0, 64)}),
    ("shapes", {"warp": ()}),
    ("operands", {"a": "fp8", "b": "fp8"}),
    ("operands", {"b": "bf16"}),
    ("output", {"out": "int8"}),
    ("schedule", {"schedule": "pingpong"}),
    ("swizzle", {"swizzle": 3}),
    ("alignment", {"alignment": 3}),
    ("stages", {"stages": 17}),
    ("since", {"a": "bf16", "b": "bf16", "arch": "sm_75"}),
    ("unit", {"unit": "simt"}),
    ("int8", {"operation": "dgrad"}),
    ("scales", {"a_scale": "channel"}),
    ("gradients", {"operation": "wgrad"}),
    ("wide", {"out": "fp32"}),
    ("parts", {"order": "split_k"}),
    ("names", {"cluster": (1, 1, 1)}),
    ("warp divides tile", {"warp": (48, 64, 64)}),
    ("instruction", {"instruction": (16, 8, 16)}),
    ("iterations", {"tile": (128, 128, 32), "warp": (64, 64, 32)}),
    ("rows of memory", {"tile": (128, 128, 256), "warp": (64, 64, 256)}),
    ("16 bytes", {"alignment": 8}),
    ("warps", {"tile": (512, 512, 64), "warp": (64, 64, 64)}),
    ("loads", {"tile": (16, 128, 64), "warp": (16, 16, 64)}),
    ("registers", {"warp": (128, 128, 64)}),
    ("order", {"order": "stream_k"}),
    ("strided sums", {"operation": "dgrad", "strided": True}),
    ("pipeline", {"schedule": "pipelined", "stages": 2}),
    ("in flight", {"schedule": "pipelined", "tile": (128, 128, 128), "warp": (64, 64, 128)}),
    ("stages of the pipeline", {"stages": 2}),
    ("shared memory", {"stages": 10, "tile": (256, 128, 64)}),
]


@pytest.mark.parametrize(("name", "changed"), BROKEN, ids=[name for name, _ in BROKEN])
def test_invalid_configs_violate_their_rule(name: str, changed: dict[str, Any]) -> None:
    valid = next(
        config for config in conv_candidates(RESNET, "sm_80") if config.tile == (128, 128, 64)
    )
    assert not constraints.CONV.broken(valid)
    found = [rule.name for rule in constraints.CONV.broken(dataclasses.replace(valid, **changed))]
    assert name in found


HOPPER_BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("hopper", {"arch": "sm_80"}),
    ("wgmma", {"warp": (64, 64, 64)}),
    ("stride", {"operation": "dgrad", "strided": True}),
    ("tf32", {"operation": "wgrad", "a": "tf32", "b": "tf32"}),
    ("cluster", {"cluster": None}),
    ("tile m", {"tile": (256, 64, 64)}),
    ("tile n", {"tile": (64, 96, 64)}),
    ("tile k", {"tile": (64, 64, 32)}),
    ("TMA", {"alignment": 4}),
    ("registers", {"tile": (128, 256, 64)}),
    ("order", {"order": "persistent"}),
    ("shared memory", {"stages": 16}),
    ("stages of the pipeline", {"stages": 1}),
]


@pytest.mark.parametrize(
    ("name", "changed"), HOPPER_BROKEN, ids=[name for name, _ in HOPPER_BROKEN]
)
def test_invalid_wgmma_configs_violate_their_rule(name: str, changed: dict[str, Any]) -> None:
    problem = dataclasses.replace(RESNET, a="bf16", b="bf16", a_scale="none", b_scale="none")
    valid = conv_candidates(problem, "sm_90a")[0]
    assert codegen.conv_on_hopper(valid)
    found = [rule.name for rule in constraints.CONV.broken(dataclasses.replace(valid, **changed))]
    assert name in found


def test_every_rule_can_be_broken() -> None:
    others = {"columns of memory", "simt tile", "strided swizzle", "deep sums"}
    assert {
        rule.name
        for table in (
            constraints.CONV.plain,
            constraints.CONV.both,
            constraints.CONV.cutlass_2,
            constraints.CONV.cutlass_3,
        )
        for rule in table
    } == {n for n, _ in BROKEN + HOPPER_BROKEN} | others
    wgrad = ConvProblem(
        "wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "fp16", "fp16", "fp16"
    )
    narrow = dataclasses.replace(
        conv_candidates(wgrad, "sm_80")[0], tile=(32, 128, 32), warp=(32, 32, 32)
    )
    assert "columns of memory" in [rule.name for rule in constraints.CONV.broken(narrow)]
    strided = conv_candidates(
        dataclasses.replace(wgrad, operation="dgrad", stride=(2, 2)), "sm_80"
    )[0]
    assert "strided swizzle" in [
        rule.name for rule in constraints.CONV.broken(dataclasses.replace(strided, swizzle=2))
    ]
    simt = conv_candidates(dataclasses.replace(wgrad, a="fp32", b="fp32", out="fp32"), "sm_80")[0]
    assert "simt tile" in [
        rule.name for rule in constraints.CONV.broken(dataclasses.replace(simt, alignment=4))
    ]
    deep = next(
        config for config in conv_candidates(wgrad, "sm_80") if config.tile == (128, 128, 64)
    )
    assert "deep sums" in [
        rule.name for rule in constraints.CONV.broken(dataclasses.replace(deep, arch="sm_90a"))
    ]


def test_unsupported_problem_has_a_reason() -> None:
    (config, *_) = conv_candidates(RESNET, "sm_90a")
    gemm = GemmProblem(8, 8, 8, "int8", "int8", "bf16")
    for problem, words in (
        (gemm, "a convolution (fprop)"),
        (dataclasses.replace(RESNET, operation="wgrad"), "fprop, not wgrad"),
        (dataclasses.replace(RESNET, a="bf16", b="bf16"), "int8 by int8"),
        (dataclasses.replace(RESNET, out="fp32"), "its output is bf16"),
        (dataclasses.replace(RESNET, c=24), "c = 24 is not a multiple of 16"),
        (dataclasses.replace(RESNET, k=12), "k = 12 is not a multiple of 8"),
        (dataclasses.replace(RESNET, n=10**5), "2 GiB"),
        (dataclasses.replace(RESNET, r=60), "larger than the image"),
        (dataclasses.replace(RESNET, padding=(200, 1)), "127 pixels"),
        (dataclasses.replace(RESNET, stride=(9, 1)), "strides up to 8"),
        (dataclasses.replace(RESNET, n=0), "at least 1"),
        (dataclasses.replace(RESNET, a_scale="channel"), "scales that vary"),
    ):
        assert words in str(select.serves(config, problem)), problem
