"""Convolutions that are computed as others: input gradients as outputs, one dimension as two. Held against torch, exactly."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import assume, given, settings, strategies as st
from test_cuda_conv import RESNET, problems
from torch.nn import functional as F

from qsync_fx.backend.cuda.choose.candidates_conv import conv_candidates
from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.problem.conv_mapping import as_2d, flipped


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
