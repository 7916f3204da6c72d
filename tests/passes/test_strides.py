"""Strides and aliases of a rewritten graph: equal to the model's during tracing.

Dynamo's graph lacks a `contiguous()` without an effect, and contains the results of
`is_contiguous()` and `stride()`. Invariant: `view` and `as_strided` after an operator that a pass
or a decomposition replaces return the values of eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.backend.inductor.decompositions import for_inductor
from qsync_fx.backend.operators.convert import in_order
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.formats import precision
from qsync_fx.graph import saved_tensors
from qsync_fx.graph.fx_utils import memory_order, same_strides
from tests.support import tiers

LAST = torch.channels_last
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patch the CPU to compute BF16 by default, and clear the cache of compiled code."""
    monkeypatch.setattr(saved_tensors, "default_precision", lambda device: precision("bf16"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Calling(nn.Module):
    """Module that calls a function with its input and its parameters."""

    def __init__(self, function: Function, *weights: Tensor) -> None:
        super().__init__()
        self.function, self.weights = (
            function,
            nn.ParameterList(nn.Parameter(weight) for weight in weights),
        )

    def forward(self, x: Tensor) -> Tensor:
        # Dynamo of torch 2.11 cannot iterate over a ParameterList here.
        return self.function(x, *[self.weights[place] for place in range(len(self.weights))])


class Viewed(torch.autograd.Function):
    """A copy whose backward function views its gradient as rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(gradient.shape[0], -1).view(gradient.shape) * 1.0


def viewed(x: Tensor) -> Tensor:
    result: Tensor = Viewed.apply(x)  # type: ignore[no-untyped-call]
    return result


def weight(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.1


def heads(x: Tensor, parts: Tensor) -> list[Tensor]:
    return [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in F.linear(x, parts).chunk(3, -1)]


def attended(x: Tensor, parts: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*heads(x, parts))


def images() -> Tensor:
    return torch.randn(4, 64, 8, 8)


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


MODELS: dict[str, Callable[[], tuple[Tensor, Function, Sequence[Tensor]]]] = {
    "attention, contiguous, view": lambda: (
        torch.randn(4, 8, 32), lambda x,
        w: attended(x, w).transpose(1, 2).contiguous().view(4, 8, 32), [weight(96, 32)]
    ),
    "attention, view": lambda: (
        torch.randn(4, 8, 32), lambda x, w: attended(x, w).transpose(1, 2).view(4, 8, 32),
        [weight(96, 32)]
    ),
    "attention, as_strided": lambda: (
        torch.randn(4, 8, 32), lambda x, w: attended(x, w).as_strided((4, 8, 32), (256, 32, 1)),
        [weight(96, 32)]
    ),
    "attention by a trained mask, contiguous, view": lambda: (
        torch.randn(4, 8, 32),
        lambda x, w,
        mask: F.scaled_dot_product_attention(*heads(x, w), attn_mask=mask).contiguous().view(8, -1),
        [weight(96, 32), weight(8, 8)],
    ),
    "gradient of attention, view": lambda: (
        torch.randn(4, 8, 32),
        lambda x,
        w: F.scaled_dot_product_attention(*(viewed(t.transpose(1, 2)).transpose(1,
        2) for t in heads(x, w))),
        [weight(96, 32)],
    ),
    "convolution by a channels-last weight, view": lambda: (
        images(), lambda x, w: conv(x, w).permute(0, 2, 3, 1).view(4, -1),
        [weight(64, 64, 3, 3).to(memory_format=LAST)]
    ),
    "convolution of channels-last images, view": lambda: (
        images().to(memory_format=LAST), lambda x, w: conv(x, w).permute(0, 2, 3, 1).view(4, -1),
        [weight(64, 64, 3, 3)]
    ),
    "convolution, as_strided": lambda: (
        images(), lambda x, w: conv(x, w).as_strided((4, 64, 16), (4096, 64, 1), 3),
        [weight(64, 64, 3, 3)]
    ),
    "convolution, if not contiguous": lambda: (
        images(), lambda x,
        w: (y if (y := conv(x, w)).is_contiguous() else y.contiguous()).view(4, -1),
        [weight(64, 64, 3, 3)],
    ),
    "1-D convolution of a transposed input, view": lambda: (
        torch.randn(4, 20, 64).transpose(1, 2), lambda x, w: F.conv1d(x, w, padding=1).view(4, -1),
        [weight(64, 64, 3)]
    ),
    "gradient of a convolution, view": lambda: (images(), lambda x, w: conv(viewed(x * 1), w),
    [weight(64, 64, 3, 3)]),
    "gradient of a depthwise convolution, view": lambda: (
        images(), lambda x, w: F.conv2d(viewed(x * 1), w, padding=1, groups=64, stride=2),
        [weight(64, 1, 3, 3)]
    ),
    "gradient of a large depthwise convolution, view": lambda: (
        images(), lambda x, w: F.conv2d(viewed(x * 1), w, padding=3, groups=64),
        [weight(64, 1, 7, 7)]
    ),
    "gradient of max pooling, view": lambda: (
        images(), lambda x, w: F.max_pool2d(viewed(x * w), 2).to(memory_format=LAST) * 2,
        [torch.ones(1)]
    ),
    "rows of a product, as_strided": lambda: (
        torch.randn(8, 64), lambda x, w: F.linear(x, w)[::2].as_strided((8, 10), (64, 1), 5) * 1,
        [weight(64, 64)]
    ),
    "a row of a product, as_strided": lambda: (
        torch.randn(8, 64), lambda x,
        w: F.linear(x, w)[3].float().as_strided((8, 10), (64, 1), 5) * 1, [weight(64, 64)]
    ),
    "an expanded product, as_strided": lambda: (
        torch.randn(8, 64), lambda x,
        w: F.linear(x, w)[:1].expand(8, 64).as_strided((8, 10), (64, 1), 5) * 1,
        [weight(64, 64)],
    ),
}  # fmt: skip
QUICK = {
    ("attention, contiguous, view", "bf16", "inductor"),
    ("attention by a trained mask, contiguous, view", "bf16", "aot_eager"),
    ("convolution by a channels-last weight, view", "int8", "inductor"),
    ("gradient of max pooling, view", "bf16", "inductor"),
    ("rows of a product, as_strided", "bf16", "aot_eager"),
    ("a row of a product, as_strided", "int8", "aot_eager"),
}


def cases() -> list[Any]:
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in QUICK else tiers.ALL)
        for name in MODELS
        for inner_backend in ("inductor", "aot_eager")
        for case in [(name, fmt, inner_backend) for fmt in ("bf16", "int8")]
    ]


def step(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of the parameters."""
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    leaf.grad = None
    y = call(leaf)
    y.square().mean().backward()
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())]


@tiers.one_in(2)
@pytest.mark.parametrize(("name", "fmt", "inner_backend"), cases())
def test_views_after_rewritten_nodes_equal_eager(name: str, fmt: str, inner_backend: str) -> None:
    by_torch = (fmt, inner_backend) == ("int8", "inductor") and not native_integer_products()
    if by_torch and name.endswith("product, as_strided"):
        pytest.skip("Inductor computes only the rows of the view: docs/known-issues.md")
    torch.manual_seed(0)
    x, function, weights = MODELS[name]()
    model = Calling(function, *weights)
    expected = step(model, model, x)
    result = step(
        model,
        torch.compile(
            model, backend="qsync", options={"precision": fmt, "inner_backend": inner_backend}
        ),
        x,
    )
    for actual, reference in zip(result, expected, strict=True):
        assert actual.shape == reference.shape
        assert (
            float((actual - reference).norm() / reference.norm())
            < {"bf16": 0.03, "int8": 0.15}[fmt]
        )


def layouts(shape: Sequence[int]) -> Iterator[Tensor]:
    """Yield tensors of a shape: contiguous, transposed, channels-last, sliced and with the first
    dimensions swapped.
    """
    yield torch.randn(shape)
    yield torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if len(shape) in (4, 5):
        yield torch.randn(shape).to(
            memory_format=LAST if len(shape) == 4 else torch.channels_last_3d
        )
    yield torch.randn(2 * shape[0], *shape[1:])[::2]
    if len(shape) > 2:
        yield torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)


LAYERS: dict[str, tuple[tuple[int, ...], Function, list[Tensor]]] = {
    "linear": ((8, 16), F.linear, [weight(24, 16), weight(24)]),
    "linear of a sequence": ((4, 8, 16), F.linear, [weight(24, 16)]),
    "matmul": ((4, 8, 16), torch.matmul, [weight(16, 24)]),
    "weight first": ((16, 8), lambda x, w: w @ x, [weight(24, 16)]),
    "addmm": ((8, 16), lambda x, w, b: torch.addmm(b, x, w), [weight(16, 24), weight(24)]),
    "einsum": ((4, 8, 16), lambda x, w: torch.einsum("bij,jk->bki", x, w), [weight(16, 24)]),
    "conv1d": ((4, 16, 20), lambda x, w: F.conv1d(x, w, padding=1), [weight(24, 16, 3)]),
    "conv2d": ((4, 16, 6, 6), conv, [weight(24, 16, 3, 3)]),
    "conv2d by channels-last": ((4, 16, 6, 6), conv, [weight(24, 16, 3, 3).to(memory_format=LAST)]),
    "conv2d to one pixel": ((4, 16, 3, 3), F.conv2d, [weight(24, 16, 3, 3)]),
    "conv2d to one channel": ((4, 16, 6, 6), conv, [weight(1, 16, 3, 3)]),
    "grouped": ((4, 16, 6, 6), lambda x, w: F.conv2d(x, w, groups=4), [weight(24, 4, 3, 3)]),
    "transposed": (
        (4, 16, 6, 6),
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        [weight(16, 24, 3, 3)],
    ),
    "conv3d": ((2, 8, 4, 4, 4), F.conv3d, [weight(12, 8, 3, 3, 3)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients_have_the_strides_of_torch(name: str) -> None:
    shape, function, weights = LAYERS[name]
    model = Calling(function, *weights)
    call = torch.compile(
        model,
        backend="qsync",
        options={"precision": "int8", "inner_backend": "eager"},
        dynamic=False,
    )
    for x in layouts(shape):
        torch._dynamo.reset()
        leaf = x.requires_grad_()
        results = [run(leaf) for run in (model, call)]
        for gradient in layouts(results[0].shape):
            theirs, ours = (
                torch.autograd.grad(y, [leaf, *model.parameters()], gradient, retain_graph=True)
                for y in results
            )
            for expected, actual in zip((results[0], *theirs), (results[1], *ours), strict=True):
                assert strides(expected) == strides(actual), (x.stride(), gradient.stride())


def strides(value: Tensor) -> list[int]:
    """Return the strides along dimensions of more than one value."""
    return [step for size, step in zip(value.shape, value.stride(), strict=True) if size != 1]


def convolution_gradients(x: Tensor, w: Tensor, stride: int, dtype: torch.dtype) -> tuple[Any, ...]:
    y = F.conv2d(x, w, None, stride, w.shape[-1] // 2, groups=w.shape[0])
    sizes = (
        None,
        [stride] * 2,
        [w.shape[-1] // 2] * 2,
        [1, 1],
        False,
        [0, 0],
        w.shape[0],
        [True, True, False],
    )
    return torch.ones_like(y).to(dtype), x.to(dtype), w.to(dtype), *sizes


def test_decompositions_have_the_strides_of_the_operators() -> None:
    aten, table = torch.ops.aten, for_inductor(torch.device("cpu"), fast_dropout=True)
    assert table is not None
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for x in layouts((2, 8, 9, 9)):
        for last in (False, True):
            y, indices = F.max_pool2d(x, 2, return_indices=True)
            gradient = y.to(memory_format=LAST) if last else y.contiguous()
            window = [2, 2], [2, 2], [0, 0], [1, 1], False
            calls.append(
                (aten.max_pool2d_with_indices_backward.default, (gradient, x, *window, indices))
            )
            calls.append(
                (
                    aten.threshold_backward.default,
                    (x.to(memory_format=LAST if last else torch.preserve_format), x, 0),
                )
            )
            for stride, size, dtype in (
                (2, 3, torch.bfloat16),
                (1, 7, torch.float32),
                (2, 7, torch.bfloat16),
            ):
                w = weight(8, 1, size, size)
                arguments = convolution_gradients(x, w, stride, dtype)
                gradient = arguments[0].to(memory_format=LAST if last else torch.contiguous_format)
                calls.append((aten.convolution_backward.default, (gradient, *arguments[1:])))
        calls.append((aten.native_dropout.default, (x, 0.5, True)))
    table_rows = torch.randn(3, 5, 8).transpose(0, 1)
    calls.append(
        (
            aten.embedding_dense_backward.default,
            (table_rows, torch.zeros(5, 3, dtype=torch.int64), 4, -1, False),
        )
    )
    for operator, arguments in calls:
        results = [output if isinstance(output, tuple) else (output,) for output in
                   (operator(*arguments), table[operator](*arguments))]  # fmt: skip
        for expected, actual in zip(*results, strict=True):
            if expected is not None and expected.dtype is not torch.bool:
                assert strides(expected) == strides(actual), (
                    operator,
                    [t.stride() for t in arguments if isinstance(t, Tensor)],
                )


def test_in_order_copies_only_what_has_other_strides() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert in_order(x, (0, 1, 2, 3)) is x
    channels_last = x.to(memory_format=LAST)
    assert in_order(channels_last, (0, 2, 3, 1)) is channels_last
    copy = in_order(x, (0, 2, 3, 1))
    assert torch.equal(copy, x) and copy.stride() == channels_last.stride()
    pixel = torch.randn(2, 3, 1, 1)
    expected = torch.empty(2, 3, 1, 1, memory_format=LAST)
    assert in_order(pixel, memory_order(expected) or ()).stride() == expected.stride(), (
        "strides equal those of torch, also in dimensions of size 1"
    )


def test_non_dense_tensors_have_no_order() -> None:
    x = torch.randn(4, 6)
    assert memory_order(x.t()) == [1, 0]
    assert memory_order(x[:, ::2]) is None and memory_order(x[:1].expand(4, 6)) is None
    assert same_strides(x[::2], x[::2].clone())
    assert not same_strides(x, x.t().contiguous().t())
