"""Outputs that share memory: in every format a write to one output shows in the others, and in
their gradients.

Invariant: values are small integers, exact in BF16 as in FP32. Results equal torch.compile's
    ("aot_eager") to the last bit, and if it raises the backend raises too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_writes import product, whole
from torch import Tensor
from torch.nn import functional as F

import qsync_fx
from qsync_fx.errors import PassError
from tests.support.models.small_models import compiled

Model = Callable[[Tensor], tuple[Tensor, ...]]


def _written_between(x: Tensor) -> tuple[Tensor, ...]:
    y = product(x)
    row, transposed = y[0], y.t()
    y.add_(1)
    return row, transposed, product(y)


def _view_written(x: Tensor) -> tuple[Tensor, ...]:
    y = product(x)
    row = y[0]
    row.mul_(2)
    return y, row


def _view_without_gradients(x: Tensor) -> tuple[Tensor, ...]:
    y = product(x)
    with torch.no_grad():
        flat = y.view(-1)
    return y, flat


def _of(*views: Callable[[Tensor], Any]) -> Model:
    """Return a model whose outputs are views of one product."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = product(x)
        outputs: list[Tensor] = []
        for view in views:
            made = view(y)
            outputs += made if isinstance(made, (tuple, list)) else [made]
        return tuple(outputs)

    return model


MODELS: dict[str, Model] = {
    "a tensor and its views": _of(
        lambda y: y, lambda y: y.view(-1), lambda y: y[0], lambda y: y.t()
    ),
    "views alone": _of(lambda y: y.view(-1), lambda y: y[0]),
    "views of views": _of(lambda y: y.t()[1:].unsqueeze(0), lambda y: y.t()[:2]),
    "twice": _of(lambda y: y, lambda y: y),
    "chunks": _of(lambda y: y.chunk(2), lambda y: y),
    "unbind": _of(lambda y: y.unbind(0)),
    "split": _of(lambda y: y.split([1, 3])[0], lambda y: y.split([1, 3])[1][1:]),
    "detach": _of(lambda y: y, lambda y: y.detach()),
    "reshape": _of(
        lambda y: y, lambda y: y.reshape(-1), lambda y: y.contiguous(), lambda y: y.t().reshape(-1)
    ),
    "many kinds": _of(
        lambda y: y.narrow(0, 1, 2), lambda y: y.unflatten(1, (2, 2)), lambda y: y.diagonal()
    ),
    "expand": _of(lambda y: y[:1].expand(3, 4), lambda y: y),
    "memory by its layout": _of(
        lambda y: y, lambda y: y.as_strided((2, 2), (4, 1)), lambda y: y.view(torch.int32)
    ),
    "conversions that change nothing": _of(
        lambda y: y[0], lambda y: y.float()[1:], lambda y: y.to(y.device).t()
    ),
    "dropout in evaluation": _of(lambda y: y, lambda y: F.dropout(y, 0.5, training=False)),
    "two tensors": lambda x: (product(x), product(product(x))[1:], product(x)[0]),
    "an input": lambda x: (x, x.view(-1), product(x), x),
    "written between": _written_between,
    "a view is written": _view_written,
    "a view without gradients": _view_without_gradients,
}


def outcome(call: Any, x: Tensor, index: int, recorded: bool) -> list[Any]:
    """Return all observable effects of a call after a write to output `index`."""
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    value = leaf * 1
    outputs = call(value)
    try:
        with torch.set_grad_enabled(recorded):
            outputs[index].mul_(2)
        if x.requires_grad:
            sum(t.float().sum() for t in outputs if t.requires_grad).backward()
    except RuntimeError as error:
        return [str(error).partition(".")[0]]
    facts = [(t.dtype, t.stride(), t.requires_grad, t.tolist()) for t in outputs]
    return [*facts, value.tolist(), None if leaf.grad is None else leaf.grad.tolist()]


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("name", MODELS)
def test_a_write_to_an_output_shows_where_it_shows_in_torch(name: str, gradients: bool) -> None:
    model, x = MODELS[name], whole(4, 4).requires_grad_(gradients)
    torch._dynamo.reset()
    theirs, ours = torch.compile(model, backend="aot_eager"), compiled(model, precision="bf16")
    for index in range(len(model(x))):
        for recorded in (True, False) if gradients else (False,):
            assert outcome(ours, x, index, recorded) == outcome(theirs, x, index, recorded), (
                f"output {index} written"
            )


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_the_tensor_is_cast_once_and_only_where_memory_is_shared(precision: str) -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, z = torch.relu(F.linear(x, weight)), torch.tanh(F.linear(x, weight))
        return y.view(-1), y[0], z[0]

    inputs = torch.randn(4, 8), torch.randn(8, 8)
    text = qsync_fx.explain(model, *inputs, options={"precision": precision}).graph()
    assert text.count(", float32)") == 2
    assert "f32[4, 8] = aten.to.dtype(%relu, float32)" in text
    assert "f32[8] = aten.to.dtype(%select_1, float32)" in text
    flat, row, _ = compiled(model, precision=precision)(*inputs)
    row.zero_()
    assert not flat[:8].any()
    assert flat[8:].any()


def test_views_outlive_a_graph_break() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = product(x)
        row = y[0]
        torch._dynamo.graph_break()
        y.add_(1)
        return y * 1, row * 1

    x = whole(4, 4)
    for actual, wanted in zip(compiled(model, precision="bf16")(x), model(x), strict=True):
        assert torch.equal(actual, wanted)


def test_stale_view_of_a_cast_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are read through a cast, whose source is written afterwards. No pass corrects this, so
    the verifier must detect it.
    """

    def model(x: Tensor) -> Tensor:
        y = product(x)
        bits = y.view(torch.int32)
        y.add_(1)
        return bits * 1

    with pytest.raises(PassError, match="no reader of a cast gets a stale value"):
        compiled(model, precision="bf16")(whole(4, 4))
    torch._dynamo.reset()
    monkeypatch.delenv("QSYNC_VERIFY")
    with pytest.warns(UserWarning, match="Please report"):
        assert torch.equal(compiled(model, precision="bf16")(whole(4, 4)), model(whole(4, 4)))
