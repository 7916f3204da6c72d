"""Convolution kernels without a GPU: what is a kernel, what is tried, what is compiled; and the mappings, by computing them.

The host side of a compiled kernel is held against the rules: what they let pass, CUTLASS takes. All kernels are compiled by
tests/cuda_compile_all.py; here is one, for sm_80.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional as F

from qsync_fx.backend.cuda import (
    candidates as tried,
    compiler,
    conv_source,
    hardware,
    library as libraries,
    rules,
    rules_conv,
    serving,
    toolchain,
)
from qsync_fx.backend.cuda.abi import ConvArguments
from qsync_fx.backend.cuda.candidates_conv import conv_candidates, conv_configs
from qsync_fx.backend.cuda.config import ARCHITECTURES, Arch, KernelConfig
from qsync_fx.backend.cuda.conv_mapping import as_2d, flipped
from qsync_fx.backend.cuda.problem import Activation, ConvOperation, ConvProblem, GemmProblem
from qsync_fx.errors import ToolchainError

RUNNING: tuple[Arch, ...] = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
FORMATS = [a for a, b in hardware.OPERANDS if a == b and not a.startswith("fp8")]
ALIGNED = {"int8": 16, "fp16": 8, "bf16": 8, "tf32": 4, "fp32": 1}
RESNET = ConvProblem(
    "fprop", 64, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "int8", "int8", "bf16", "tensor", "channel"
)

pair = st.tuples(st.integers(0, 5), st.integers(0, 5))
steps = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def problems(draw: st.DrawFn, unit: int = 1, **fixed: Any) -> ConvProblem:
    """Problems in all formats, with channels that are multiples of `unit`; also those whose filter is larger than the image."""
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
        draw(st.sampled_from(hardware.OUTPUTS)),
        draw(st.sampled_from(["none", "tensor"])),
        draw(st.sampled_from(["none", "tensor", "channel"])),
        operation == "fprop" and draw(st.booleans()),
        draw(st.sampled_from(get_args(Activation))) if operation == "fprop" else "none",
    )
    return dataclasses.replace(found, **fixed)


@settings(max_examples=200)
@given(problem=problems(), arch=st.sampled_from(ARCHITECTURES))
def test_candidates_are_kernels_that_serve_in_a_stable_order(problem: ConvProblem, arch: Arch) -> None:
    found = conv_candidates(problem, arch)
    assert found == conv_candidates(problem, arch)
    assert len({config.name for config in found}) == len(found)
    for config in found:
        assert rules.problems(config) == []
        assert serving.serves(config, problem) is None
        assert config.arch == arch
    assert tried.candidates(problem, arch)[: len(found)] == tuple(found)


@settings(max_examples=200)
@given(problem=problems(unit=16), arch=st.sampled_from(RUNNING))
def test_usual_problems_have_kernels(problem: ConvProblem, arch: Arch) -> None:
    """Where there is none, it is for a reason that is written down, and of the problem or the architecture."""
    assume(hardware.OPERANDS[problem.a, problem.b] <= arch)
    assume(min(problem.p, problem.q) >= 1)
    assume(problem.operation == "fprop" or problem.b_scale != "channel")
    assume(max(problem.r, problem.s) <= 32)
    count = len(conv_candidates(problem, arch))
    strided = problem.operation == "dgrad" and problem.stride != (1, 1)
    if (problem.a == "int8" and problem.operation != "fprop") or (strided and problem.dilation != (1, 1)):
        assert count == 0
    else:
        assert 8 <= count <= 16


@pytest.mark.parametrize("arch", RUNNING)
def test_every_configuration_is_a_kernel_with_a_source(arch: Arch) -> None:
    found = list(conv_configs(arch))
    names = {config.name for config in found}
    assert len({config.digest for config in found}) == len(names)
    for config in dict.fromkeys(found):
        assert rules.problems(config) == []
        unit = conv_source.source(config)
        assert unit.interface == "conv"
        assert unit.name in unit.source
        assert unit.heavy == ("conv_sm90" in unit.source) == conv_source.hopper(config)
        assert unit.opcode in ("FFMA", "HMMA", "IMMA", "HGMMA", "IGMMA")


def test_volta_has_none() -> None:
    assert not list(conv_configs("sm_70"))


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("arch", {"arch": "sm_42"}),
    ("volta", {"arch": "sm_70"}),
    ("operation", {"operation": "gemm"}),
    ("shapes", {"tile": (128, 128)}),
    ("shapes", {"tile": (128, 0, 64)}),
    ("shapes", {"warp": ()}),
    ("operands", {"a": "fp8", "b": "fp8"}),
    ("operands", {"b": "bf16"}),
    ("output", {"out": "int8"}),
    ("activation", {"activation": "tanh"}),
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
def test_what_is_no_kernel_breaks_its_rule(name: str, changed: dict[str, Any]) -> None:
    valid = next(config for config in conv_candidates(RESNET, "sm_80") if config.tile == (128, 128, 64))
    assert not rules_conv.broken(valid)
    found = [rule.name for rule in rules_conv.broken(dataclasses.replace(valid, **changed))]
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


@pytest.mark.parametrize(("name", "changed"), HOPPER_BROKEN, ids=[name for name, _ in HOPPER_BROKEN])
def test_what_is_no_wgmma_kernel_breaks_its_rule(name: str, changed: dict[str, Any]) -> None:
    problem = dataclasses.replace(RESNET, a="bf16", b="bf16", a_scale="none", b_scale="none")
    valid = conv_candidates(problem, "sm_90a")[0]
    assert conv_source.hopper(valid)
    found = [rule.name for rule in rules_conv.broken(dataclasses.replace(valid, **changed))]
    assert name in found


def test_every_rule_can_be_broken() -> None:
    others = {"columns of memory", "simt tile", "strided swizzle"}
    assert {rule.name for table in rules_conv.TABLES for rule in table} == {
        n for n, _ in BROKEN + HOPPER_BROKEN
    } | others
    wgrad = ConvProblem("wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "fp16", "fp16", "fp16")
    narrow = dataclasses.replace(conv_candidates(wgrad, "sm_80")[0], tile=(32, 128, 32), warp=(32, 32, 32))
    assert "columns of memory" in [rule.name for rule in rules_conv.broken(narrow)]
    strided = conv_candidates(dataclasses.replace(wgrad, operation="dgrad", stride=(2, 2)), "sm_80")[0]
    assert "strided swizzle" in [rule.name for rule in rules_conv.broken(dataclasses.replace(strided, swizzle=2))]
    simt = conv_candidates(dataclasses.replace(wgrad, a="fp32", b="fp32", out="fp32"), "sm_80")[0]
    assert "simt tile" in [rule.name for rule in rules_conv.broken(dataclasses.replace(simt, alignment=4))]


def test_what_is_not_served_is_told() -> None:
    (config, *_) = conv_candidates(RESNET, "sm_90a")
    gemm = GemmProblem(8, 8, 8, "int8", "int8", "bf16")
    for problem, words in (
        (gemm, "a convolution (fprop)"),
        (dataclasses.replace(RESNET, operation="wgrad"), "fprop, not wgrad"),
        (dataclasses.replace(RESNET, a="bf16", b="bf16"), "int8 by int8"),
        (dataclasses.replace(RESNET, out="fp32"), "its output is bf16"),
        (dataclasses.replace(RESNET, activation="relu"), "activation"),
        (dataclasses.replace(RESNET, c=24), "c = 24 is no multiple of 16"),
        (dataclasses.replace(RESNET, k=12), "k = 12 is no multiple of 8"),
        (dataclasses.replace(RESNET, n=10**5), "2 GiB"),
        (dataclasses.replace(RESNET, r=60), "larger than the image"),
        (dataclasses.replace(RESNET, padding=(200, 1)), "127 pixels"),
        (dataclasses.replace(RESNET, stride=(9, 1)), "strides up to 8"),
        (dataclasses.replace(RESNET, n=0), "at least 1"),
        (dataclasses.replace(RESNET, a_scale="channel"), "scales that vary"),
    ):
        assert words in str(serving.serves(config, problem)), problem


def arguments(p: ConvProblem, /, **changed: Any) -> ConvArguments:
    (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = p.padding, p.stride, p.dilation
    found: dict[str, int] = {
        "a": 4096,
        "b": 8192,
        "d": 16384,
        "a_scale": 64,
        "b_scale": 64,
        "bias": 64 if p.bias else 0,
    }
    found |= {name: getattr(p, name) for name in "nhwckrspq"}
    found |= {"pad_h": pad_h, "pad_w": pad_w, "dilation_h": dilation_h, "dilation_w": dilation_w}
    found |= {"stride_h": stride_h, "stride_w": stride_w, "b_scale_per_channel": p.b_scale == "channel"}
    found |= {"split": 1, "device": 0, "multiprocessors": 108}
    return ConvArguments(**found | changed)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelConfig, libraries.Library]:
    """A weight gradient in parts: the one whose host side decides most."""
    try:
        toolchain.toolchain("sm_80")
    except ToolchainError as error:
        pytest.skip(error.what)
    problem = ConvProblem(
        "wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "bf16", "bf16", "fp32", "tensor", "tensor"
    )
    config = next(c for c in conv_candidates(problem, "sm_80") if c.tile == (64, 64, 32) and c.order == "split_k")
    unit = conv_source.source(config)
    folder = tmp_path_factory.mktemp("conv")
    return config, libraries.load(compiler.build([unit], progress=False, folder=folder)[unit], unit)


@settings(max_examples=200)
@given(data=st.data())
def test_what_the_rules_let_pass_the_kernel_takes(
    kernel: tuple[KernelConfig, libraries.Library], data: st.DataObject
) -> None:
    config, library = kernel
    fixed = {
        "operation": "wgrad",
        "out": "fp32",
        "a_scale": "tensor",
        "bias": False,
        "activation": "none",
        "b_scale": "tensor",
    }
    problem = data.draw(problems(data.draw(st.sampled_from([1, 4, 8])), fmt="bf16", **fixed))
    refused = library.can_implement(arguments(problem))
    if serving.serves(config, problem) is None:
        assert refused is None
    elif problem.c % 8 or problem.k % 8 or min(problem.p, problem.q) < 1:
        assert refused is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"a": 4098},
        {"b": 0},
        {"d": 16388},
        {"p": 55},
        {"n": 0},
        {"pad_h": -1},
        {"stride_w": 0},
        {"bias": 64},
        {"b_scale_per_channel": 1},
        {"split": -1},
        {"c": 60},
    ],
)
def test_wrong_arguments_are_refused(kernel: tuple[KernelConfig, libraries.Library], changed: dict[str, int]) -> None:
    problem = ConvProblem(
        "wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "bf16", "bf16", "fp32", "tensor", "tensor"
    )
    assert kernel[1].can_implement(arguments(problem)) is None
    assert kernel[1].can_implement(arguments(problem, **changed)) is not None


def test_parts_keep_the_device_busy(kernel: tuple[KernelConfig, libraries.Library]) -> None:
    """The workspace holds a counter for each tile, where there is more than one part."""
    config, library = kernel
    small = ConvProblem("wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "bf16", "bf16", "fp32")
    assert library.workspace(arguments(small)) == 4 * 9
    wide = dataclasses.replace(small, n=1, h=7, w=7, c=1024, k=1024)
    assert library.workspace(arguments(wide)) == 0
    assert library.workspace(arguments(wide, split=2)) == 4 * 16 * 144
    assert library.shared_memory() >= 6 * (64 + 64) * 32 * 2
    assert config.stages == 6


@settings(max_examples=50)
@given(data=st.data())
def test_input_gradients_are_flipped_convolutions(data: st.DataObject) -> None:
    p = data.draw(
        problems(operation="dgrad", fmt="int8", b_scale="tensor", stride=(1, 1), bias=False, activation="none")
    )
    p = dataclasses.replace(p, n=2, h=p.h % 12 + 1, w=p.w % 12 + 1, c=3, k=2, r=p.r % 5 + 1)
    assume(min(p.p, p.q) >= 1)
    found = flipped(p)
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (p.k, p.c, p.r, p.s)).double()
    y = torch.randint(-127, 128, (p.n, p.k, p.p, p.q)).double()
    wanted = torch.nn.grad.conv2d_input((p.n, p.c, p.h, p.w), weight, y, 1, p.padding, p.dilation)
    if isinstance(found, str):
        assert found == "it is padded by more than its filter reaches"
        return
    assert (found.operation, found.p, found.q, found.k) == ("fprop", p.h, p.w, p.c)
    turned = weight.permute(0, 2, 3, 1).flip(1, 2).permute(3, 1, 2, 0).contiguous()  # [c, r, s, k]
    assert turned.shape == (found.k, found.r, found.s, found.c)
    computed = F.conv2d(y, turned.permute(0, 3, 1, 2), None, 1, found.padding, found.dilation)
    assert torch.equal(computed, wanted)
    assert found.flops >= 0
    assert conv_candidates(dataclasses.replace(found, c=16, k=16), "sm_80")


def test_what_is_not_flipped_is_told() -> None:
    gradient = dataclasses.replace(RESNET, operation="dgrad", b_scale="tensor")
    assert isinstance(flipped(gradient), ConvProblem)
    assert flipped(RESNET) == "fprop is no input gradient"
    assert "strided" in str(flipped(dataclasses.replace(gradient, stride=(2, 1))))
    assert "along the sum" in str(flipped(dataclasses.replace(gradient, b_scale="channel")))


@settings(max_examples=30)
@given(data=st.data())
def test_one_dimension_is_two_with_height_one(data: st.DataObject) -> None:
    draw = data.draw
    length, kernel_size, stride, padding, dilation = (
        draw(st.integers(*limits)) for limits in ((9, 40), (1, 4), (1, 3), (0, 3), (1, 2))
    )
    x, weight = torch.randn(2, 3, length).double(), torch.randn(4, 3, kernel_size).double()
    found = as_2d("fprop", x.shape, weight.shape, [stride], [padding], [dilation], a="bf16", b="bf16", out="bf16")
    assert isinstance(found, ConvProblem)
    wanted = F.conv1d(x, weight, None, stride, padding, dilation)
    assert (found.n, found.k, found.p, found.q) == (2, 4, 1, wanted.shape[-1])
    computed = F.conv2d(x.unsqueeze(2), weight.unsqueeze(2), None, found.stride, found.padding, found.dilation)
    torch.testing.assert_close(computed.squeeze(2), wanted)
    # Channels last, both lie in memory alike.
    assert x.unsqueeze(2).permute(0, 2, 3, 1).shape == (found.n, found.h, found.w, found.c)


def test_what_has_no_mapping_is_told() -> None:
    formats = {"a": "bf16", "b": "bf16", "out": "bf16"}
    two = [1, 1], [0, 0], [1, 1]
    assert as_2d("fprop", (1, 8, 4, 5), (8, 8, 3, 2), *two, **formats).w == 5  # type: ignore[union-attr]
    cube = [1] * 3, [0] * 3, [1] * 3
    assert "3-D" in str(as_2d("fprop", (1, 8, 4, 4, 4), (8, 8, 3, 3, 3), *cube, **formats))
    assert "groups" in str(as_2d("fprop", (1, 8, 4, 4), (8, 4, 3, 3), *two, groups=2, **formats))
    assert "transposed" in str(as_2d("fprop", (1, 8, 4, 4), (8, 8, 3, 3), *two, transposed=True, **formats))
