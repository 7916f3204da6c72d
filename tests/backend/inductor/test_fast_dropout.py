"""The option "fast_dropout": masks, drop rate, mask reuse in the backward pass, and graphs that
fall back to torch's dropout.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import _C
from qsync_fx.backend.inductor.decompositions import for_inductor
from qsync_fx.backend.inductor.recompute_policy import keep
from qsync_fx.backend.numerics import reference
from tests.support import tiers

SEED = torch.tensor([2**40 + 12345])


def expected(size: tuple[int, ...], stream: int, p: float) -> Tensor:
    random = reference.uniform(torch.empty(size), SEED, stream)
    return (random.double() >= p).to(torch.uint8)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 2.0**-24, 0.999, 1.0])
@pytest.mark.parametrize("size", [(5,), (3, 1021), (0, 4), (40_001,)])
def test_keep_is_its_reference_on_every_path(size: tuple[int, ...], p: float) -> None:
    wanted = expected(size, 7, p)
    assert torch.equal(keep(size, SEED, 7, p), wanted)
    for isa in _C.available_isas():
        for threads in (1, 3):
            actual = torch.empty(size, dtype=torch.uint8)
            _C.keep(actual.data_ptr(), actual.numel(), p, int(SEED), 7, threads, isa=isa)
            assert torch.equal(actual, wanted), (isa, threads)


def test_wrong_probabilities_raise() -> None:
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="not within"):
            keep((3,), SEED, 0, p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_probability_and_the_neighbours(p: float) -> None:
    """The drop rate is within five standard deviations; neighbours, rows and streams are
    uncorrelated.
    """
    n = 1 << 20
    centered = keep((n,), SEED, 3, p).double() - (1 - p)
    bound = 5 * math.sqrt(p * (1 - p) / n)
    assert abs(centered.mean()) < bound
    for lag in (1, 2, 16, 768, 4096):
        assert abs((centered[lag:] * centered[:-lag]).mean()) < 5 * p * (1 - p) / math.sqrt(n - lag)
    other = keep((n,), SEED, 4, p).double() - (1 - p)
    assert abs((centered * other).mean()) < 5 * p * (1 - p) / math.sqrt(n)


class Dropping(nn.Module):
    def forward(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attended = scaled_dot_product_attention(q, q, q, dropout_p=0.5 if self.training else 0.0)
        return dropout(x, 0.25, self.training), dropout(x, 0.25, self.training), attended


def traced(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Return a backend that traces as Inductor does, with the option's decomposition, and runs the
    graphs in eager mode.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend: Callable[..., Any] = aot_autograd(  # type: ignore[no-untyped-call]
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=for_inductor(torch.device("cpu"), fast_dropout=True),
    )
    return backend


def test_backward_uses_the_forward_dropout_mask() -> None:
    graphs: list[fx.GraphModule] = []
    x, q = torch.ones(64, 100, requires_grad=True), torch.randn(2, 4, 16, 8, requires_grad=True)
    compiled = torch.compile(Dropping(), backend=traced(graphs))
    torch.manual_seed(0)
    first, second, attended = compiled(x, q)
    gradient, into = torch.autograd.grad(first.sum() + attended.sum(), (x, q))
    assert torch.equal(gradient, first.detach())
    assert into.isfinite().all()
    assert set(first.flatten().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    # The two dropouts of the graph draw independent masks.
    assert 0.5 < ((first == 0) == (second == 0)).float().mean() < 0.75
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert called.count("qsync.keep.default") == 3
    assert not any("rand" in name or "bernoulli" in name or "dropout" in name for name in called)
    torch.manual_seed(0)
    assert torch.equal(compiled(x, q)[0], first)
    assert not torch.equal(compiled(x, q)[0], first)
    torch._dynamo.reset()


def test_evaluation_has_no_dropout() -> None:
    graphs: list[fx.GraphModule] = []
    x, q = torch.randn(4, 5), torch.randn(1, 2, 3, 4)
    outputs = torch.compile(Dropping().eval(), backend=traced(graphs))(x, q)
    assert torch.equal(outputs[0], x)
    assert not any("keep" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    torch._dynamo.reset()


def test_checkpoint_recomputes_the_same_dropout_mask() -> None:
    """torch restores its generator before recomputation, which also restores the stream."""
    x = torch.ones(50, 50, requires_grad=True)
    compiled = torch.compile(nn.Dropout(0.5), backend=traced([]))
    result = checkpoint(compiled, x, use_reentrant=False)
    assert isinstance(result, Tensor)
    result.square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, result.detach() * 4)  # 2 y dy/dx, and both are 2 or 0
    torch._dynamo.reset()


class Checkpointed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result = checkpoint(lambda y: dropout(y.sin(), 0.5).exp(), x, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result


@tiers.ALL
@pytest.mark.parametrize("model", [Checkpointed(), "native"], ids=["checkpoint", "native"])
def test_where_it_cannot_be_torchs_dropout_stays(model: Any) -> None:
    class Native(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dropped, mask = torch.native_dropout(x, 0.5, True)
            return torch.where(mask, dropped, -1.0)

    module = Native() if model == "native" else model
    x = torch.ones(40, 40, requires_grad=True)
    compiled = torch.compile(
        module, backend="qsync", options={"fast_dropout": True, "precision": "fp32"}
    )
    with pytest.warns(qsync_fx.PlanWarning, match="fast_dropout"):
        output = compiled(x)
    torch.manual_seed(0)
    output = compiled(x)
    output.sum().backward()
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert torch.equal(
        output, torch.compile(module, backend="qsync", options={"precision": "fp32"})(x)
    )
    torch._dynamo.reset()


@tiers.ALL
def test_fast_dropout_is_the_default_if_possible() -> None:
    outputs = {}
    for option in (None, True, False):
        options = {} if option is None else {"fast_dropout": option}
        torch._dynamo.reset()
        compiled = torch.compile(
            nn.Dropout(0.25), backend="qsync", options={"precision": "fp32", **options}
        )
        torch.manual_seed(0)
        outputs[option] = compiled(torch.ones(100, 100))
        torch.manual_seed(0)
        assert torch.equal(compiled(torch.ones(100, 100)), outputs[option])
    assert torch.equal(outputs[None], outputs[True])
    assert not torch.equal(outputs[None], outputs[False])
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", qsync_fx.PlanWarning)
        compiled = torch.compile(Checkpointed(), backend="qsync", options={"precision": "fp32"})
        compiled(torch.ones(40, 40, requires_grad=True)).sum().backward()
    torch._dynamo.reset()


@tiers.ALL
def test_a_model_trains_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 8))
    x = torch.randn(128, 32)
    target = x[:, :8].sin()
    optimizer = qsync_fx.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(
        model, backend="qsync", options={"fast_dropout": True, "precision": "bf16"}
    )
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", qsync_fx.PlanWarning)
        for _ in range(40):
            loss = (compiled(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    torch._dynamo.reset()
