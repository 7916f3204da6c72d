"""Copies of weights outside of graphs: recreated after a write that torch counts, of any size, and
freed with their weight.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import qsync_fx
from qsync_fx.backend import weight_cache
from qsync_fx.backend.weight_cache import CopySpec, copies
from tests.support import tiers
from tests.support.computing.weight_writes import Write


def equal(actual: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(actual) == len(wanted) > 0 and all(map(torch.equal, actual, wanted))


def stepped(optimizer: Callable[..., Any], **optimizer_args: Any) -> Write:
    def write(layer: nn.Linear) -> None:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer([layer.weight], lr=0.5, **optimizer_args).step()

    return write


def compiled_step(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer = torch.optim.AdamW([layer.weight], lr=0.5)
    torch.compile(lambda: optimizer.step())()


def in_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(2)


class ThroughData(torch.optim.Optimizer):
    """Optimizer whose writes increment no version counter."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


STEPS: dict[str, Write] = {
    **{
        f"{o.__name__}, fused": stepped(o, fused=True) for o in (torch.optim.SGD, torch.optim.AdamW)
    },
    **{
        f"{o.__name__}, foreach": stepped(o, foreach=True)
        for o in (torch.optim.SGD, torch.optim.AdamW)
    },
    **{
        f"{o.__name__} of ours": stepped(o)
        for o in (qsync_fx.optim.SGD, qsync_fx.optim.Adam, qsync_fx.optim.AdamW)
    },
    **{
        o.__name__: stepped(o)
        for o in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD)
    },
    "through .data": stepped(ThroughData),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(
        torch.ones(24 * 12), [layer.weight]
    ),
    "inference mode": in_inference_mode,
}


@pytest.mark.parametrize("name", [*STEPS, pytest.param("compiled", marks=tiers.ALL)])
def test_steps_of_optimizers_are_counted(name: str) -> None:
    torch.manual_seed(0)
    layer, seed = nn.Linear(24, 12, bias=False), torch.zeros([1], dtype=torch.int64)
    spec = CopySpec(0, "int8", "nearest", ())
    (before,) = copies([(layer.weight, spec)], seed)
    {**STEPS, "compiled": compiled_step}[name](layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (copy,) = copies([(layer.weight, spec)], seed)
    assert copy[0] is not before[0] and equal([*copy], [*spec.of(layer.weight, seed)])


def test_reused_memory_invalidates_the_copy() -> None:
    """A parameter whose memory is replaced twice between two passes can have its first address
    again.
    """
    weight, seed = nn.Parameter(torch.ones(1000)), torch.zeros([1], dtype=torch.int64)
    spec = CopySpec(0, "int8", "nearest", ())
    copies([(weight, spec)], seed)
    for factor in range(2, 8):
        weight.data = weight.data * factor
        (copy,) = copies([(weight, spec)], seed)
        assert equal([*copy], [*spec.of(weight, seed)])


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,), (300, 2), (3, 5, 2, 2)])
def test_weights_of_any_size_and_strides(shape: tuple[int, ...]) -> None:
    seed, spec = torch.zeros([1], dtype=torch.int64), CopySpec(0, "int8", "nearest", ())
    gapped = torch.randn(*shape, 2)[..., 0] if shape else torch.tensor(2.0)
    for values in (
        torch.randn(shape),
        torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape),
        gapped,
    ):
        weight = nn.Parameter(values)
        pairs = [copies([(weight, spec)], seed)[0] for _ in range(5)]
        assert all(equal([*pair], [*spec.of(weight, seed)]) for pair in pairs)
        assert pairs[0][0] is pairs[4][0]


def test_numbers_that_are_none_are_the_same_as_before(recwarn: pytest.WarningsRecorder) -> None:
    weight, seed = (
        nn.Parameter(torch.full((4, 4), float("nan"))),
        torch.zeros([1], dtype=torch.int64),
    )
    quantized = [
        copies([(weight, CopySpec(0, "int8", "nearest", ()))], seed)[0][0] for _ in range(4)
    ]
    assert all(q is quantized[0] for q in quantized) and not recwarn.list


def test_fake_tensors_are_not_cached() -> None:
    """DDP runs the compiled graph of a bucket on fake tensors to infer inputs of the next."""
    with FakeTensorMode():
        weight, seed = nn.Parameter(torch.ones(4, 6)), torch.zeros([1], dtype=torch.int64)
        ((q, scale),) = copies([(weight, CopySpec(0, "int8", "nearest", ()))], seed)
    assert isinstance(q, FakeTensor) and q.shape == (4, 6) and scale.shape == ()
    assert weight not in weight_cache._copies_by_weight


def test_cuda_graph_capture_reads_no_cached_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would read the cached copy in every replay."""
    weight, seed, spec = (
        nn.Parameter(torch.ones(4)),
        torch.zeros([1], dtype=torch.int64),
        CopySpec(0, "int8", "nearest", ()),
    )
    before = copies([(weight, spec)], seed)
    monkeypatch.setattr(weight_cache, "_queue", lambda device: None)
    assert copies([(weight, spec)], seed)[0][0] is not before[0][0]
    monkeypatch.undo()
    assert copies([(weight, spec)], seed)[0][0] is before[0][0]


def test_cuda_streams_have_separate_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from another stream may not be complete yet."""
    weight, seed, spec = (
        nn.Parameter(torch.ones(4)),
        torch.zeros([1], dtype=torch.int64),
        CopySpec(0, "int8", "nearest", ()),
    )
    quantized = []
    for queue in (1, 2, 1, 2):
        monkeypatch.setattr(weight_cache, "_queue", lambda device, queue=queue: queue)
        quantized.append(copies([(weight, spec)], seed)[0][0])
    assert (
        quantized[0] is quantized[2]
        and quantized[1] is quantized[3]
        and quantized[0] is not quantized[1]
    )


def test_copies_go_with_their_weight() -> None:
    weight, seed = nn.Parameter(torch.ones(4)), torch.zeros([1], dtype=torch.int64)
    ((q, _),) = copies([(weight, CopySpec(0, "int8", "nearest", ()))], seed)
    gone = weakref.ref(q)
    del weight, q
    gc.collect()
    assert gone() is None
