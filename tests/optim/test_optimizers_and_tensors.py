"""Tensors and layouts that the optimizer kernels support, and the fallback to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from tests.support.computing.compared_optimizers import PAIRS, steps

pytest_plugins = ["tests.support.computing.compared_optimizers"]


@pytest.mark.parametrize("name", PAIRS)
def test_layouts(name: str, counted: list[int]) -> None:
    """Check that kernels support layouts without gaps and convert gradients to them; torch updates
    other parameters.
    """
    torch.manual_seed(5)
    image = torch.randn(4, 3, 5, 5)
    shapes = [
        image.contiguous(memory_format=torch.channels_last),
        torch.randn(6, 9).t(),
        torch.randn(1, 5),
    ]
    gapped = torch.randn(12, 8)
    ends = []
    for kind in PAIRS[name]:
        weights = [nn.Parameter(torch.empty_like(shape).copy_(shape)) for shape in shapes]
        weights += [nn.Parameter(gapped.clone()[::2])]
        optimizer = kind(weights, lr=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.sin(weight.detach()).contiguous()
            optimizer.step()
        assert [weight.stride() for weight in weights[:2]] == [
            shape.stride() for shape in shapes[:2]
        ]
        ends.append([weight.detach() for weight in weights])
    assert counted == [3, 3, 3]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_unsupported_tensors_use_torch(name: str, counted: list[int]) -> None:
    """Mix FP64, BF16, complex tensors and a tensor subclass with supported tensors in one group."""

    class Own(Tensor):
        pass

    torch.manual_seed(6)
    values = [torch.randn(9), torch.randn(9, dtype=torch.float64), torch.randn(9).bfloat16()]
    values += [
        torch.randn(9, dtype=torch.complex64),
        torch.randn(9).as_subclass(Own),
        torch.randn(9),
    ]
    ends = []
    for kind in PAIRS[name]:
        optimizer = kind([value.clone().requires_grad_() for value in values], lr=0.1)
        steps(optimizer, [[value.cos() for value in values]] * 2)
        ends.append([parameter.detach() for parameter in optimizer.param_groups[0]["params"]])
    assert counted == [2, 2]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def test_sparse_gradients_are_for_torch(counted: list[int]) -> None:
    ends = []
    for kind in PAIRS["SGD"]:
        torch.manual_seed(7)
        table, layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)
        optimizer = kind([*table.parameters(), *layer.parameters()], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            layer(table(torch.tensor([1, 3]))).sum().backward()
            optimizer.step()
        ends.append([table.weight.detach(), layer.weight.detach()])
    assert counted == [2, 2]
    torch.testing.assert_close(ends[0], ends[1])
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        qsync_fx.optim.AdamW(table.parameters()).step()


def test_on_another_device_torch_steps(counted: list[int]) -> None:
    parameter = nn.Parameter(torch.zeros(4, device="meta"))
    parameter.grad = torch.zeros(4, device="meta")
    for kind, _ in PAIRS.values():
        kind([parameter]).step()
    assert not counted


@pytest.mark.parametrize("name", PAIRS)
def test_differentiable_steps_are_torchs(name: str) -> None:
    ends = []
    for kind in PAIRS[name]:
        start = torch.linspace(1, 2, 5, requires_grad=True)
        weight = start.clone()
        optimizer = kind([weight], lr=0.1, differentiable=True)
        weight.grad = start.square()
        optimizer.step()
        ends.append(torch.autograd.grad(weight.sum(), start)[0])
    torch.testing.assert_close(ends[0], ends[1])
