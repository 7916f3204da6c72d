"""Convolution kernels without a GPU: valid configurations, candidates, supported problems.

test_cuda_conv_on_cpu.py tests their results, test_cuda_conv_compiled.py a compiled kernel.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any, get_args

import pytest
import test_cuda_gemm
from hypothesis import assume, given, settings, strategies as st

from qsync_fx.backend.cuda import codegen, kernel_config
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, GemmProblem
from qsync_fx.backend.cuda.selection import candidates, constraints
from qsync_fx.backend.cuda.selection.candidates import conv_configs

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
    """Draw a problem in any format, with channels that are multiples of `unit`; the filter may be
    larger than the image.
    """
    fmt = fixed.pop("fmt", None) or draw(st.sampled_from(FORMATS))
    channels = st.integers(1, 1024 // unit).map(lambda value: value * unit)
    operation = draw(st.sampled_from(get_args(ConvOperation)))
    problem = ConvProblem(
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
    return dataclasses.replace(problem, **fixed)


@settings(max_examples=200)
@given(problem=problems(), arch=st.sampled_from(ARCHITECTURES))
def test_candidates_are_kernels_that_serve_in_a_stable_order(
    problem: ConvProblem, arch: Arch
) -> None:
    configs = candidates.candidates(problem, arch)
    assert configs == candidates.candidates(problem, arch)
    assert len({config.name for config in configs}) == len(configs)
    for config in configs:
        assert constraints.problems(config) == []
        assert constraints.serves(config, problem) is None
        assert config.arch == arch


@settings(max_examples=200)
@given(problem=problems(unit=16), arch=st.sampled_from(RUNNING))
def test_usual_problems_have_kernels(problem: ConvProblem, arch: Arch) -> None:
    """Check for 8 to 16 candidates, but none for INT8 gradients and for strided, dilated dgrad."""
    assume(kernel_config.OPERANDS[problem.a, problem.b] <= arch)
    assume(min(problem.p, problem.q) >= 1)
    assume(problem.operation == "fprop" or problem.b_scale != "channel")
    assume(max(problem.r, problem.s) <= 32)
    count = len(candidates.candidates(problem, arch))
    strided = problem.operation == "dgrad" and problem.stride != (1, 1)
    if (problem.a == "int8" and problem.operation != "fprop") or (
        strided and problem.dilation != (1, 1)
    ):
        assert count == 0
    else:
        assert 8 <= count <= 16


@pytest.mark.parametrize("arch", RUNNING)
def test_every_configuration_is_a_kernel_with_a_source(arch: Arch) -> None:
    configs = list(conv_configs(arch))
    names = {config.name for config in configs}
    assert len({config.digest for config in configs}) == len(names)
    for config in dict.fromkeys(configs):
        assert constraints.problems(config) == []
        unit = codegen.conv_source(config)
        assert unit.interface == "conv"
        assert unit.name in unit.source
        assert unit.heavy == ("conv_sm90" in unit.source) == codegen.on_hopper(config)
        assert unit.opcode in ("FFMA", "HMMA", "IMMA", "HGMMA", "IGMMA")


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("the architecture must be one of", {"arch": "sm_42"}),
    ("the architecture must be one of", {"arch": "sm_70"}),
    ("three sizes", {"tile": (128, 128)}),
    ("three sizes", {"tile": (128, 0, 64)}),
    ("three sizes", {"warp": ()}),
    ("must have the same format", {"a": "fp8", "b": "fp8"}),
    ("must have the same format", {"b": "bf16"}),
    ("the output must be", {"out": "int8"}),
    ("the schedule of a convolution", {"schedule": "pingpong"}),
    ("the swizzle must be", {"swizzle": 3}),
    ("alignments must be powers", {"alignment": 3}),
    ("at most 16 stages", {"stages": 17}),
    ("must have tensor cores", {"a": "bf16", "b": "bf16", "arch": "sm_75"}),
    ("fp32 needs the unit", {"unit": "simt"}),
    ("only fprop supports INT8", {"operation": "dgrad"}),
    ("a kernel reads no scales", {"a_scale": "channel"}),
    ("have no bias", {"operation": "wgrad"}),
    ("at most 16 bytes", {"out": "fp32"}),
    ("support split_k", {"order": "split_k"}),
    ("needs warp and instruction", {"cluster": (1, 1, 1)}),
    ("must divide the tile", {"warp": (48, 64, 64)}),
    ("the instruction must be", {"instruction": (16, 8, 16)}),
    ("a multiple of the instruction", {"tile": (128, 128, 32), "warp": (64, 64, 32)}),
    ("64 or 128 bytes along k", {"tile": (128, 128, 256), "warp": (64, 64, 256)}),
    ("read 16 bytes at a time", {"alignment": 8}),
    ("1 to 16 warps", {"tile": (512, 512, 64), "warp": (64, 64, 64)}),
    ("divide evenly among threads", {"tile": (16, 128, 64), "warp": (16, 16, 64)}),
    ("must fit into registers", {"warp": (128, 128, 64)}),
    ("the tile order must be", {"order": "stream_k"}),
    ("compute pixel indices", {"operation": "dgrad", "strided": True}),
    ("needs the schedule pipelined", {"schedule": "pipelined", "stages": 2}),
    (
        "has loaded must fit",
        {"schedule": "pipelined", "tile": (128, 128, 128), "warp": (64, 64, 128)},
    ),
    ("needs two stages", {"stages": 2}),
    ("fit into shared memory", {"stages": 10, "tile": (256, 128, 64)}),
]


@pytest.mark.parametrize(("name", "changed"), BROKEN, ids=[name for name, _ in BROKEN])
def test_invalid_configs_violate_their_rule(name: str, changed: dict[str, Any]) -> None:
    valid = next(
        config for config in candidates.candidates(RESNET, "sm_80") if config.tile == (128, 128, 64)
    )
    assert not constraints.problems(valid)
    violations = constraints.problems(dataclasses.replace(valid, **changed))
    assert any(name in sentence for sentence in violations)


HOPPER_BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("a schedule of sm_90a", {"arch": "sm_80"}),
    ("no warp and instruction", {"warp": (64, 64, 64)}),
    ("input gradients of stride 1", {"operation": "dgrad", "strided": True}),
    ("needs TF32 contiguous along the reduction", {"operation": "wgrad", "a": "tf32", "b": "tf32"}),
    ("a cluster must have", {"cluster": None}),
    ("m of the tile must be", {"tile": (256, 64, 64)}),
    ("n of the tile must be", {"tile": (64, 96, 64)}),
    ("128 bytes along k", {"tile": (64, 64, 32)}),
    ("TMA copies", {"alignment": 4}),
    ("must fit into registers", {"tile": (128, 256, 64)}),
    ("the tile order must be", {"order": "persistent"}),
    ("fit into shared memory", {"stages": 16}),
    ("at least two stages", {"stages": 1}),
]


@pytest.mark.parametrize(
    ("name", "changed"), HOPPER_BROKEN, ids=[name for name, _ in HOPPER_BROKEN]
)
def test_invalid_wgmma_configs_violate_their_rule(name: str, changed: dict[str, Any]) -> None:
    problem = dataclasses.replace(RESNET, a="bf16", b="bf16", a_scale="none", b_scale="none")
    valid = candidates.candidates(problem, "sm_90a")[0]
    assert codegen.on_hopper(valid)
    violations = constraints.problems(dataclasses.replace(valid, **changed))
    assert any(name in sentence for sentence in violations)


def test_rules_of_gradients_can_be_broken() -> None:
    wgrad = ConvProblem(
        "wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "fp16", "fp16", "fp16"
    )
    narrow = dataclasses.replace(
        candidates.candidates(wgrad, "sm_80")[0], tile=(32, 128, 32), warp=(32, 32, 32)
    )
    assert "rows of 128 bytes" in str(constraints.problems(narrow))
    strided = candidates.candidates(
        dataclasses.replace(wgrad, operation="dgrad", stride=(2, 2)), "sm_80"
    )[0]
    assert "the swizzle of strided" in str(
        constraints.problems(dataclasses.replace(strided, swizzle=2))
    )
    simt = candidates.candidates(
        dataclasses.replace(wgrad, a="fp32", b="fp32", out="fp32"), "sm_80"
    )[0]
    assert "simt tiles must" in str(constraints.problems(dataclasses.replace(simt, alignment=4)))
    deep = next(
        config for config in candidates.candidates(wgrad, "sm_80") if config.tile == (128, 128, 64)
    )
    assert "weight gradients on sm_90a" in str(
        constraints.problems(dataclasses.replace(deep, arch="sm_90a"))
    )


def test_every_rule_is_broken_by_a_case() -> None:
    (gemm_cases,) = [
        mark.args[1] for mark in test_cuda_gemm.test_broken_rules_are_returned.pytestmark
    ]  # type: ignore[attr-defined]
    parts = [rule for _, _, rule in gemm_cases] + [rule for rule, _ in BROKEN + HOPPER_BROKEN]
    gradients = ["rows of 128 bytes", "the swizzle of strided", "simt tiles", "gradients on sm_90a"]
    rules = inspect.getsource(constraints).partition("def serves(")[0]
    yields = [node.value for node in ast.walk(ast.parse(rules)) if isinstance(node, ast.Yield)]
    sentences = [node.value for node in yields if isinstance(node, ast.Constant)]
    assert len(sentences) > 40
    assert [s for s in sentences if not any(part in s for part in parts + gradients)] == []


def test_unsupported_problem_has_a_reason() -> None:
    (config, *_) = candidates.candidates(RESNET, "sm_90a")
    gemm = GemmProblem(8, 8, 8, "int8", "int8", "bf16")
    for problem, words in (
        (gemm, "it computes fprop, not gemm"),
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
        assert words in str(constraints.serves(config, problem)), problem
