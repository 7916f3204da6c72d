"""The option `gradient_rounding`: gradients of 16 bits whose mean over many roundings is what FP32 makes of them.

How far a mean may lie from its expectation is what `test_unbiased.greatest_z` says. The gradients that roundings start from are in FP32 and
the formats of the forward pass are rounded to nearest, so that all that is random is what the option makes so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiers
import torch
import torch.distributed as dist
from small_models import Convolutional, Counting, Perceptron, assert_equal, build, compiled, gradients, relative_error
from test_unbiased import LARGEST_Z, greatest_z
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.backend.numerics import reference
from qsync_fx.backend.operators.casts.quantize import quantize
from qsync_fx.backend.operators.casts.round import gridded_format, round_to
from qsync_fx.backend.operators.products import round_gradients
from qsync_fx.errors import PassError
from qsync_fx.graph import meta
from qsync_fx.rounding.layout import BACKWARD, GRADIENTS, RESULT, Streams

DRAWS = 250
SEED = torch.tensor([0])
HOW: dict[str, Any] = {"gradient_rounding": "stochastic", "rounding": "nearest"}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Transposed(nn.Module):
    """Its product is written as `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight, self.layer.bias = nn.Parameter(torch.randn(4, 9)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.layer.bias, x, self.layer.weight.t())


class Written(nn.Module):
    """A product that is no layer, of a weight `[K, N]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight, self.layer.bias = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight + self.layer.bias


class Conv(nn.Module):
    """With a stride of 2, on which some taps of the kernel meet nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


LAYERS: dict[type[nn.Module], tuple[int, ...]] = {
    Linear: (6, 9),
    Transposed: (6, 9),
    Written: (6, 9),
    Conv: (2, 3, 4, 1),
}


def values(t: Tensor, fmt: str) -> Tensor:
    """What a layer in a format computes with, in FP64."""
    if fmt == "bf16":
        return t.detach().bfloat16().double()
    q, scale = quantize(t.detach(), SEED, 0, fmt, "nearest", [])
    return q.double() * scale.double()


def draws(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, gradient: Tensor) -> Iterator[list[Tensor]]:
    for _ in range(DRAWS):
        yield list(torch.autograd.grad(run(x), (x, layer.weight, layer.bias), gradient))


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("fmt", ["bf16", "int8"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=tiers.ALL)])
def test_gradients_are_right_on_average(make: type[nn.Module], fmt: str, inner: str) -> None:
    """Of a layer whose input is FP32, and so its gradient: what is rounded is what comes in, and the product is not rounded at all."""
    model = build(make)
    x, layer = torch.randn(LAYERS[make], requires_grad=True), model.layer
    gradient = torch.randn_like(model(x))
    operands = [values(t, fmt).requires_grad_() for t in (x, layer.weight)]
    if inner == "inductor" and fmt == "bf16":
        # It makes the narrow weight anew for the backward pass, in the kernel that widens it, and leaves both conversions out.
        operands[1] = layer.weight.detach().double()
    exact_layer = build(make).double()
    with torch.no_grad():
        exact_layer.layer.weight.copy_(operands[1])
    leaves = operands[0], exact_layer.layer.weight, exact_layer.layer.bias
    exact = torch.autograd.grad(exact_layer(operands[0]), leaves, gradient.double())
    for rounding in ("stochastic", "nearest"):
        torch._dynamo.reset()
        run = compiled(model, precision=fmt, inner=inner, **{**HOW, "gradient_rounding": rounding})
        found = [
            greatest_z(d, e) for d, e in zip(zip(*draws(run, layer, x, gradient), strict=True), exact, strict=True)
        ]
        # Where the output is FP32, as that of INT8 here, the gradient of a bias is summed before anything is rounded.
        checked = found if fmt == "bf16" and make is not Written else found[:2]
        assert max(found) < LARGEST_Z if rounding == "stochastic" else min(checked) > 3 * LARGEST_Z, (rounding, found)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_a_gradient_that_stays_in_bf16_is_rounded_from_its_sum_in_fp32(fmt: str) -> None:
    """The second layer's input is BF16, so the gradient of it is: what the first layer gets is right on average all the same."""
    first, second = (nn.Linear(*sizes, bias=False) for sizes in ((9, 8), (8, 5)))
    model = nn.Sequential(first, nn.ReLU(), second)
    x, gradient = torch.randn(16, 9), torch.randn(16, 5).bfloat16().float()
    operands = [values(t, fmt) for t in (x, first.weight, second.weight)]
    open_gates = operands[0] @ operands[1].t() > 0
    exact = ((gradient.double() @ operands[2]) * open_gates).t() @ operands[0]
    for rounding in ("stochastic", "nearest"):
        torch._dynamo.reset()
        run = compiled(lambda x: model(x), precision=fmt, inner="eager", **{**HOW, "gradient_rounding": rounding})
        found = greatest_z((torch.autograd.grad(run(x), first.weight, gradient)[0] for _ in range(DRAWS)), exact)
        assert found < LARGEST_Z if rounding == "stochastic" else found > 3 * LARGEST_Z


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=tiers.ALL)])
@pytest.mark.parametrize("fmt", ["bf16", "int8", "fp8", "int8_grad"])
def test_the_forward_pass_is_the_same_and_gradients_are_as_near(fmt: str, inner: str) -> None:
    found = {}
    for rounding in ("nearest", "stochastic"):
        torch._dynamo.reset()
        model = build(Convolutional)
        before = torch.get_rng_state()
        y = compiled(model, precision=fmt, inner=inner, gradient_rounding=rounding)(torch.randn(16, 1, 8, 8))
        y.square().mean().backward()
        found[rounding] = y.detach(), gradients(model)
        torch.set_rng_state(before)
    assert torch.equal(found["nearest"][0], found["stochastic"][0])
    error = relative_error(found["stochastic"][1], found["nearest"][1])
    assert 0 < error < (0.02 if fmt in ("bf16", "int8") else 0.2)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_the_seed_of_torch_decides_and_torchs_generator_stays(fmt: str) -> None:
    model, x = build(Perceptron), torch.randn(8, 16)
    run = compiled(model, precision=fmt, gradient_rounding="stochastic")

    def steps() -> list[dict[str, Tensor]]:
        torch.manual_seed(3)
        before, found = torch.get_rng_state(), []
        for _ in range(2):
            model.zero_grad()
            run(x).square().mean().backward()
            found.append(gradients(model))
        assert torch.equal(torch.get_rng_state(), before)
        return found

    steps()  # compiles
    first, again = steps(), steps()
    for one, other in zip(first, again, strict=True):
        assert_equal(one, other)
    assert relative_error(*first) > 0


def test_ranks_round_independently() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, x = build(Perceptron), torch.randn(8, 16)
    run, found = compiled(model, precision="bf16", gradient_rounding="stochastic"), []
    for rank in (0, 1, 0):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            torch.manual_seed(0)
            model.zero_grad()
            run(x).square().mean().backward()
            found.append(gradients(model))
        finally:
            dist.destroy_process_group()
    assert relative_error(found[0], found[1]) > 0
    assert_equal(found[0], found[2])


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_checkpointed_regions_round_as_without(fmt: str) -> None:
    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.body, self.checkpointed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), checkpointed
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            body = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
            return self.head(x + body)

    found = []
    for checkpointed in (False, True):
        model = build(lambda here=checkpointed: Model(here))
        torch.manual_seed(5)
        compiled(model, precision=fmt, gradient_rounding="stochastic")(torch.randn(8, 16)).square().mean().backward()
        found.append(gradients(model))
    assert_equal(*found)


def test_other_batch_sizes_are_not_compiled_anew() -> None:
    model, counting = build(Convolutional), Counting()
    run = counting.compile(model, precision="bf16", gradient_rounding="stochastic")
    for batch in (4, 7, 9, 12):
        x = torch.randn(batch, 1, 8, 8)
        torch._dynamo.mark_dynamic(x, 0)
        run(x).square().mean().backward()
    assert len(counting.graphs) == 1


def test_off_by_default_and_without_gradients() -> None:
    model, x = build(Perceptron), torch.randn(4, 16)
    name = "stochastic_gradients"
    assert name not in qsync_fx.explain(model, x, options={"precision": "bf16"}).passes
    options = {"precision": "bf16", "gradient_rounding": "stochastic"}
    assert qsync_fx.explain(model, x, options=options).passes[-1] == name
    with torch.no_grad():
        assert name not in qsync_fx.explain(model, x, options=options).passes


def test_what_stays_rounded_to_the_nearest_says_so() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            key = self.norm(self.key(x))
            return key @ key.transpose(1, 2)

    options = {"precision": "bf16", "gradient_rounding": "stochastic"}
    found = {
        op.id.operator: op.reason for op in qsync_fx.explain(Scores(), torch.randn(2, 5, 16), options=options).operators
    }
    assert "nearest" not in found["linear"]
    assert "its gradients are rounded to the nearest value" in found["matmul"]


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_to_torchs_own_types(fmt: str, dtype: torch.dtype) -> None:
    """To nearest it is torch's conversion, to the bit; stochastically one of both neighbours, and beyond the range infinite."""
    torch.manual_seed(0)
    limit = torch.finfo(dtype).max
    special = [
        0.0,
        -0.0,
        limit,
        -limit,
        1.01 * limit,
        -torch.inf,
        torch.inf,
        torch.nan,
        torch.finfo(dtype).smallest_normal / 3,
    ]
    x = torch.cat([torch.randn(999) * torch.randn(999).mul(4).exp(), torch.tensor(special)])
    nearest = round_to(x, SEED, 0, fmt, "nearest")
    assert nearest.dtype is dtype
    assert torch.equal(nearest.view(torch.int16)[:-2], x.to(dtype).view(torch.int16)[:-2])
    assert nearest[-2].isnan()
    below, above = round_to(x, SEED, 0, fmt, "floor"), -round_to(-x, SEED, 0, fmt, "floor")
    drawn = torch.stack([round_to(x, torch.tensor([seed]), 0, fmt, "stochastic") for seed in range(DRAWS)])
    assert ((drawn == below) | (drawn == above) | x.isnan()).all()
    rounded = (below != above) & below.isfinite() & above.isfinite()
    assert greatest_z((d[rounded] for d in drawn), x[rounded].double()) < LARGEST_Z
    in_torch = reference.round_to(x, SEED, 3, gridded_format(fmt, x), "stochastic")
    assert torch.equal(round_to(x, SEED, 3, fmt, "stochastic").nan_to_num(1, 2, 3), in_torch.nan_to_num(1, 2, 3))


def test_an_operator_of_a_package_asks_for_it() -> None:
    gradient = torch.randn(64, 64)
    folds = {"activation": None}
    to_nearest, _ = round_gradients(gradient, folds, SEED, 0, "int8", "stochastic")["activation"]  # type: ignore[arg-type]
    drawn, _ = round_gradients(gradient, folds, SEED, 0, "int8", "nearest", gradients="stochastic")["activation"]  # type: ignore[arg-type]
    assert torch.equal(to_nearest, gradient.bfloat16())
    assert not torch.equal(drawn, to_nearest)
    assert (drawn - gradient).abs().max() <= 2**-7 * gradient.abs().max()


def test_widen_is_an_operator_that_torch_accepts() -> None:
    x = torch.randn(4, 5).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.qsync.widen.default, (x, SEED, 0, torch.float32))
    assert torch.equal(torch.ops.qsync.widen.default(x, SEED, 0, torch.float32), x.float())


def test_roundings_of_gradients_draw_from_streams_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    plan = qsync_fx.Plan.uniform("bf16").with_precision("2", "int8")
    options: dict[str, Any] = {"plan": plan, "gradient_rounding": "stochastic"}
    found = qsync_fx.explain(model, torch.randn(4, 16, requires_grad=True), options=options)
    nodes = found.graph_module("stochastic_gradients").graph.nodes
    facts = [fact for node in nodes for fact in (meta.CAST.get(node), meta.NOTE.get(node)) if fact is not None]
    streams = [fact.stream for fact in facts if fact.stream is not None]
    assert any(stream < GRADIENTS for stream in streams)
    assert any(GRADIENTS <= stream < RESULT for stream in streams)
    # What the backward pass of an operator adds to its own stream leads to no other's.
    drawn = [stream + place + more for stream in streams for place in (0, *BACKWARD.values()) for more in (0, RESULT)]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) < 2**32

    @qsync_fx.graph_pass(after="stochastic_gradients")
    def draw_alike(graph: qsync_fx.PrecisionGraph) -> None:
        first, second, *_ = (op for op in graph.operators("adjustable") if op.note.stream is not None)
        second.update(stream=first.note.stream)

    with pytest.raises(PassError, match="each rounding draws from a stream of its own"):
        qsync_fx.explain(model, torch.randn(4, 16, requires_grad=True), options={**options, "passes": [draw_alike]})


def test_a_graph_that_runs_out_of_streams_is_told() -> None:
    streams = Streams(4, 6)
    assert [streams.take(), streams.take()] == [4, 5]
    with pytest.raises(OverflowError, match="streams"):
        streams.take()
