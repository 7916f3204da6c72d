"""`@qsync_fx.rewrite`: tensors that a replacement refers to, and invalid replacements and
patterns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from qsync_fx import OptionError, PassError
from tests.support import tiers
from tests.support.compiling.rewrites import Net, explained, linear, places, rewriting, step
from tests.support.models.small_models import build, compiled

torch.set_num_threads(1)

INNER = [
    "aot_eager",
    *(pytest.param(inner_backend, marks=tiers.ALL) for inner_backend in ("eager", "inductor")),
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# Tensors that a replacement refers to.


@pytest.mark.parametrize("inner_backend", INNER)
def test_parameters_that_a_replacement_refers_to_train(inner_backend: str) -> None:
    torch.manual_seed(0)
    adapters = {"first": nn.Linear(8, 16, bias=False), "second": nn.Linear(16, 8, bias=False)}

    def put(match: qsync_fx.Match, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias) + adapters[match.module](x)

    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.first(self.norm(x)) + adapters["first"](self.norm(x)))
            return F.gelu(self.second(h) + adapters["second"](h))

    parameters = [adapter.weight for adapter in adapters.values()]
    before = [p.detach().clone() for p in parameters]

    def trained(run: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        losses = []
        for x in torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(3)):
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, [p.detach().clone() for p in parameters]

    expected = trained(build(Written))
    fast = torch.compile(
        build(Net),
        backend="qsync",
        options={
            "precision": "fp32",
            "inner_backend": inner_backend,
            "passes": [rewriting(linear, put)],
        },
    )
    actual = trained(fast)
    assert not any(torch.equal(p, value) for p, value in zip(parameters, before, strict=True))
    for result, reference in zip(
        (*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True
    ):
        assert torch.allclose(result, reference, atol=1e-6)


@pytest.mark.parametrize("inner_backend", INNER)
def test_buffers_that_a_replacement_writes_stay_written(inner_backend: str) -> None:
    largest = {"first": torch.zeros(()), "second": torch.zeros(())}

    def put(match: qsync_fx.Match, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            largest[match.module].copy_(torch.maximum(largest[match.module], x.abs().amax()))
        return F.linear(x, weight, bias)

    model = build(Net)
    reads: dict[str, float] = {"first": 0.0, "second": 0.0}
    for name in reads:

        def note(module: nn.Module, args: tuple[Tensor], name: str = name) -> None:
            reads[name] = max(reads[name], float(args[0].detach().abs().amax()))

        getattr(model, name).register_forward_pre_hook(note)
    batches = torch.randn(3, 4, 8)
    for x in batches:
        model(x)
    fast = torch.compile(
        build(Net),
        backend="qsync",
        options={
            "precision": "fp32",
            "inner_backend": inner_backend,
            "passes": [rewriting(linear, put)],
        },
    )
    for x in batches:
        fast(x).sum().backward()
    assert {name: pytest.approx(float(value), rel=1e-5) for name, value in largest.items()} == reads


def test_a_tensor_that_the_graph_has_already_is_in_it_once() -> None:
    model = build(Net)

    def put(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias) * model.norm.weight.sum()

    fuse = rewriting(linear, put)
    explanation = explained(fuse, model=model)
    assert not [
        node for node in explanation.graph_module("linear").graph.nodes if node.op == "get_attr"
    ]
    x = torch.randn(4, 8)
    _, grads = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    exact = build(Net)

    def written(x: Tensor) -> Tensor:
        scale = exact.norm.weight.sum()
        return F.gelu(exact.second(F.gelu(exact.first(exact.norm(x)) * scale)) * scale)

    _, expected = step(written, exact, x)
    assert all(torch.allclose(grads[name], expected[name], rtol=1e-4) for name in expected)


def test_operators_with_a_custom_backward() -> None:
    @torch.library.custom_op("test_rewrite::doubled_gradient", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x.clone()

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: 2 * gradient)
    model, x = build(Net), torch.randn(4, 8)
    fuse = rewriting(
        linear,
        lambda x, weight, bias: F.linear(x, doubled(weight), bias),
        where=lambda match: match.module == "second",
    )
    _, expected = step(model, model, x)
    _, actual = step(compiled(model, precision="fp32", passes=[fuse]), model, x)
    assert torch.allclose(actual["second.weight"], 2 * expected["second.weight"], rtol=1e-4)
    assert torch.allclose(actual["first.weight"], expected["first.weight"], rtol=1e-4, atol=1e-7)


# Invalid replacements and patterns.


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_GIVEN = torch.ones(8, requires_grad=True)


_COMPUTED = _GIVEN * 2


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda x: x.sum().item(), "cannot be traced"),
        (
            lambda x: x @ torch.ones(3, 3),
            "cannot be traced: RuntimeError: a and b must have same reduction dim",
        ),
        (
            lambda x: None,
            "cannot be traced: it returns NoneType, where a tensor or a tuple of tensors is "
            "expected",
        ),
        (lambda x: {"y": x}, "cannot be traced: it returns dict"),
        (
            Rounded.apply,
            "cannot be traced: it calls the autograd function Rounded, whose backward pass",
        ),
        (
            lambda x: x + _COMPUTED,
            "cannot be traced: it refers to a tensor that was computed with gradients",
        ),
        (
            lambda x: (x, x),
            r"returns f32\[4, 8\], f32\[4, 8\] where the model computes f32\[4, 8\]",
        ),
        (lambda x: x[:, :4], r"returns f32\[4, 4\] where the model computes f32\[4, 8\]"),
        (lambda x: x.double(), r"returns f64\[4, 8\] where the model computes f32\[4, 8\]"),
    ],
)
def test_replacements_that_do_not_fit(put: Callable[..., Any], message: str) -> None:
    broken = rewriting(lambda x: F.dropout(x, 0.0), lambda x: put(x), name="broken")
    with pytest.raises(PassError, match=rf"the replacement of 'broken' {message}") as caught:
        explained(broken)
    assert "operator dropout/dropout" in str(caught.value.where)
    assert inspect.getfile(Net) in str(caught.value.where)
    assert caught.value.do
    with pytest.raises(PassError, match="the replacement of 'broken'"):
        compiled(build(Net), passes=[broken])(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda x: x + _GIVEN, "refers to a tensor that it is not given"),
        (lambda x, y: x.sin(), "does not read 'y'"),
        (lambda x: x, "returns an argument"),
        (lambda x: x.sum().item(), "cannot be traced: DataDependentOutputException"),
        (lambda x: None, "cannot be traced: it returns NoneType"),
        (
            lambda x, scale=3.0: x * (scale + 1),
            "the pattern '<lambda>' passes 'scale' to no operator unchanged",
        ),
        (lambda ids, weight: F.embedding(ids, weight), "cannot be traced"),
    ],
)
def test_empty_patterns_are_rejected(find: Callable[..., Any], message: str) -> None:
    with pytest.raises(PassError, match=message) as caught:
        explained(rewriting(find, lambda: None))
    assert __file__ in str(caught.value.where)
    assert caught.value.do


def test_example_defines_the_pattern_inputs() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embedding(ids)

    def find(ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    example = torch.zeros(2, 3, dtype=torch.int64), torch.empty(5, 4)
    fuse = rewriting(find, lambda ids, weight: weight[ids], example=example)
    assert places(explained(fuse, model=Embedded(), args=(torch.randint(10, (4, 6)),))) == {
        "find": 1
    }


def test_invalid_rewrite_is_reported_at_its_source() -> None:
    with pytest.raises(OptionError, match="one place"):
        qsync_fx.rewrite(after="normalize", before="lower")
    with pytest.raises(OptionError, match="has \\*arguments"):
        qsync_fx.rewrite(lambda *args: args[0])
    with pytest.raises(OptionError, match="0 arguments for tensors"):
        qsync_fx.rewrite(lambda p=1: p)
    with pytest.raises(OptionError, match="an example of 1 tensors and 2 arguments"):
        qsync_fx.rewrite(example=(torch.empty(2),))(lambda x, y: x + y)
    with pytest.raises(OptionError, match="takes 'z', which the pattern does not have"):
        rewriting(lambda x: x.sin(), lambda z: z)
    with pytest.raises(OptionError, match="already has a replacement"):
        rewriting(linear, linear).replacement(linear)
    with pytest.raises(OptionError, match="has no replacement") as caught:
        explained(qsync_fx.rewrite(linear))
    assert caught.value.do == "decorate one with @linear.replacement"
