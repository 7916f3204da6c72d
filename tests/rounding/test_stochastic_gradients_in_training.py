"""Training with the option `gradient_rounding`: seeds, ranks, checkpointed regions, batch sizes,
reports and streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx.errors import PassError
from qsync_fx.graph import node_metadata
from qsync_fx.rounding import BACKWARD, GRADIENTS, RESULT, RandomStreams
from tests.support import tiers
from tests.support.models.small_models import (
    Convolutional,
    Counting,
    Perceptron,
    assert_equal,
    build,
    compiled,
    gradients,
    relative_error,
)


@pytest.mark.parametrize(
    ("fmt", "inner_backend"),
    [
        *(
            (fmt, inner_backend)
            for fmt in ("bf16", "int8", "fp8", "int8_grad")
            for inner_backend in ("eager", "aot_eager")
        ),
        # test_stochastic_gradients and test_fused_quantizer cover other roundings with Inductor.
        pytest.param("int8_grad", "inductor", marks=tiers.ALL),
        *(pytest.param(fmt, "inductor", marks=tiers.EVERY) for fmt in ("bf16", "int8", "fp8")),
    ],
)
def test_the_forward_pass_is_the_same_and_gradients_are_as_near(
    fmt: str, inner_backend: str
) -> None:
    results = {}
    for rounding in ("nearest", "stochastic"):
        torch._dynamo.reset()
        model = build(Convolutional)
        before = torch.get_rng_state()
        y = compiled(model, precision=fmt, inner_backend=inner_backend, gradient_rounding=rounding)(
            torch.randn(16, 1, 8, 8)
        )
        y.square().mean().backward()
        results[rounding] = y.detach(), gradients(model)
        torch.set_rng_state(before)
    assert torch.equal(results["nearest"][0], results["stochastic"][0])
    error = relative_error(results["stochastic"][1], results["nearest"][1])
    assert 0 < error < (0.02 if fmt in ("bf16", "int8") else 0.2)


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_the_seed_of_torch_decides_and_torchs_generator_stays(fmt: str) -> None:
    model, x = build(Perceptron), torch.randn(8, 16)
    run = compiled(model, precision=fmt, gradient_rounding="stochastic")

    def steps() -> list[dict[str, Tensor]]:
        torch.manual_seed(3)
        before, results = torch.get_rng_state(), []
        for _ in range(2):
            model.zero_grad()
            run(x).square().mean().backward()
            results.append(gradients(model))
        assert torch.equal(torch.get_rng_state(), before)
        return results

    steps()  # compiles
    first, again = steps(), steps()
    for actual, expected in zip(first, again, strict=True):
        assert_equal(actual, expected)
    assert relative_error(*first) > 0


def test_ranks_round_independently() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model, x = build(Perceptron), torch.randn(8, 16)
    run, results = compiled(model, precision="bf16", gradient_rounding="stochastic"), []
    for rank in (0, 1, 0):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            torch.manual_seed(0)
            model.zero_grad()
            run(x).square().mean().backward()
            results.append(gradients(model))
        finally:
            dist.destroy_process_group()
    assert relative_error(results[0], results[1]) > 0
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("fmt", ["bf16", "int8"])
def test_checkpointed_regions_round_as_without(fmt: str) -> None:
    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.body, self.checkpointed = (
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
                checkpointed,
            )
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            body = (
                checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
            )
            return self.head(x + body)

    results = []
    for checkpointed in (False, True):
        model = build(lambda recompute=checkpointed: Model(recompute))
        torch.manual_seed(5)
        compiled(model, precision=fmt, gradient_rounding="stochastic")(
            torch.randn(8, 16)
        ).square().mean().backward()
        results.append(gradients(model))
    assert_equal(*results)


def test_other_batch_sizes_do_not_recompile() -> None:
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


def test_gradients_rounded_to_nearest_are_reported() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            key = self.norm(self.key(x))
            return key @ key.transpose(1, 2)

    options = {"precision": "bf16", "gradient_rounding": "stochastic"}
    reasons = {
        op.id.operator: op.reason
        for op in qsync_fx.explain(Scores(), torch.randn(2, 5, 16), options=options).operators
    }
    assert "nearest" not in reasons["linear"]
    assert "its gradients are rounded to the nearest value" in reasons["matmul"]


def test_gradient_roundings_have_separate_streams() -> None:
    model = nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
    )
    plan = qsync_fx.Plan.uniform("bf16").with_precision("2", "int8")
    options: dict[str, Any] = {"plan": plan, "gradient_rounding": "stochastic"}
    explained = qsync_fx.explain(model, torch.randn(4, 16, requires_grad=True), options=options)
    nodes = explained.graph_module("stochastic_gradients").graph.nodes
    facts = [
        fact
        for node in nodes
        for fact in (node_metadata.CAST.get(node), node_metadata.NOTE.get(node))
        if fact is not None
    ]
    streams = [fact.stream for fact in facts if fact.stream is not None]
    assert any(stream < GRADIENTS for stream in streams)
    assert any(GRADIENTS <= stream < RESULT for stream in streams)
    # The backward pass adds offsets to an operator's stream, which lead to no other stream.
    drawn = [
        stream + offset + more
        for stream in streams
        for offset in (0, *BACKWARD.values())
        for more in (0, RESULT)
    ]
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) < 2**32

    @qsync_fx.graph_pass(after="stochastic_gradients")
    def draw_alike(graph: qsync_fx.PrecisionGraph) -> None:
        first, second, *_ = (
            op for op in graph.operators("adjustable") if op.note.stream is not None
        )
        second.update(stream=first.note.stream)

    with pytest.raises(PassError, match="each rounding draws from its own random stream"):
        qsync_fx.explain(
            model,
            torch.randn(4, 16, requires_grad=True),
            options={**options, "passes": [draw_alike]},
        )


def test_exhausted_streams_are_an_error() -> None:
    streams = RandomStreams(4, 6)
    assert [streams.take(), streams.take()] == [4, 5]
    with pytest.raises(OverflowError, match="streams"):
        streams.take()
