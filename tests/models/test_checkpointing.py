"""Activation checkpointing: gradients are bit-identical with and without it.

The recomputed forward pass must draw the random numbers of the first one, for dropout and for
stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import qsync_fx
from qsync_fx.graph import node_metadata
from tests.support import tiers
from tests.support.models.small_models import assert_equal, build, compiled, gradients

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(
        self, checkpointed: bool, dropout: float = 0.0, blocks: int = 2, **checkpoint_args: Any
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(16, 4)
        self.checkpointed = checkpointed
        self.checkpoint_args = {"use_reentrant": False, **checkpoint_args}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.checkpoint_args) if self.checkpointed else block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _save_everything() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)


def _gradients(make: Callable[[], nn.Module], **options: Any) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = build(make)
    fast = compiled(model, **options)
    for step in range(2):
        torch.manual_seed(step)
        model.zero_grad()
        fast(torch.randn(8, 16)).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "int8", "fp8"])
def test_the_same_gradients_with_and_without(precision: str, dropout: float) -> None:
    with_it = _gradients(lambda: Stack(True, dropout), precision=precision)
    assert_equal(with_it, _gradients(lambda: Stack(False, dropout), precision=precision))


def test_fp32_gradients_are_torch_s() -> None:
    actual = _gradients(lambda: Stack(True, 0.5), precision="fp32")
    plain = build(lambda: Stack(True, 0.5))
    torch.manual_seed(1)
    torch.compile(plain, backend="aot_eager")(torch.randn(8, 16)).square().mean().backward()
    assert_equal(actual, gradients(plain))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_recomputed_values_equal_saved_values(precision: str) -> None:
    """The reference saves every value of the checkpointed region."""
    recomputed = _gradients(lambda: Stack(True, 0.5), precision=precision)
    saved = _gradients(lambda: Stack(True, 0.5, context_fn=_save_everything), precision=precision)
    assert_equal(recomputed, saved)


def test_tensors_saved_for_recomputation_are_narrow() -> None:
    """The input of the region in FP32 would be twice as large as without checkpointing."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Linear(64, 64),
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, torch.relu(self.first(x)), use_reentrant=False)

    graph = (
        qsync_fx.explain(Chain(), torch.randn(8, 64), options={"precision": "bf16"}).graphs[0].graph
    )
    (region,) = (node for node in graph.nodes if node in node_metadata.BODIES)
    saved = next(used for used in region.all_input_nodes if used.name.startswith("relu"))
    assert saved.meta["val"].dtype is torch.bfloat16


@tiers.ALL
def test_a_region_in_a_region() -> None:
    class Nested(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.stack, self.checkpointed = Stack(checkpointed, 0.5), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            return (
                checkpoint(self.stack, x, use_reentrant=False)
                if self.checkpointed
                else self.stack(x)
            )

    for precision in ("fp32", "int8"):
        actual = _gradients(lambda: Nested(True), precision=precision)
        assert_equal(actual, _gradients(lambda: Nested(False), precision=precision))


@tiers.ALL
def test_recomputed_under_inductor() -> None:
    """Inductor may choose other strides and other fusions for a recomputed tensor than for a saved
    one, so results differ by rounding.
    """

    def inductors(**checkpoint_args: Any) -> dict[str, Tensor]:
        return _gradients(
            lambda: Stack(True, 0.5, blocks=1, **checkpoint_args),
            precision="int8",
            inner_backend="inductor",
        )

    first = inductors()
    assert_equal(first, inductors())
    saved = inductors(context_fn=_save_everything)
    for name, gradient in saved.items():
        assert (first[name] - gradient).norm() <= 0.02 * gradient.norm(), name


def test_the_plan_reaches_checkpointed_operators_by_the_same_ids() -> None:
    def precisions(checkpointed: bool) -> dict[str, str]:
        operators = qsync_fx.explain(
            Stack(checkpointed), torch.randn(8, 16), options={"plan": plan}
        ).operators
        return {str(op.id): str(op.precision) for op in operators if op.kind == "adjustable"}

    plan = qsync_fx.Plan.uniform("int8").with_precision("blocks.1.down", "bf16")
    assert precisions(True) == precisions(False)
    assert precisions(True)["blocks.1.down/linear"] == "bf16"
    assert precisions(True)["blocks.0.down/linear"] == "int8"


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_checkpoint_around_compiled_blocks_changes_only_memory(precision: str) -> None:
    """torch.utils.checkpoint resets the state of torch's generator to recompute, during and after
    the step that compiles.
    """

    def run(checkpointed: bool) -> list[dict[str, Tensor]]:
        torch._dynamo.reset()
        model = build(lambda: nn.ModuleList(Block(0.5) for _ in range(2)))
        blocks = [compiled(block, precision=precision) for block in model]
        actual = []
        for _ in range(2):
            model.zero_grad()
            x = torch.ones(8, 16, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            x.square().mean().backward()
            actual.append(gradients(model))
        return actual

    for actual, expected in zip(run(True), run(False), strict=True):
        assert_equal(actual, expected)
