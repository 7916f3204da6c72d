"""A class of devices with another batch, from a model whose batch is a symbol.

What was measured was measured with one batch. With another one an operator takes as much longer as it has more to compute, or to move where
it computes nothing that counts; what the catalog reckons is reckoned anew.

Invariant: with the batch that it was measured with, a class takes what was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from qsync_fx.allocator.problem import DeviceClass
from qsync_fx.errors import ProfileError, shown
from qsync_fx.graph.reads import State
from qsync_fx.predictor.memory import LossMemory, Training
from qsync_fx.predictor.memory.telling import whole
from qsync_fx.predictor.model.value import ModelGraph, StateNames
from qsync_fx.predictor.reckoned.times import DeviceTimes
from qsync_fx.predictor.times import ANYBODY, Beside, Seconds, Times


def resized(part: DeviceClass, symbolic: ModelGraph, batch: int) -> DeviceClass:
    """Returns a class of devices with another batch.

    Args:
        part: the class.
        symbolic: the model with its batch as its one symbolic size.
        batch: samples of one device in a step.

    Raises:
        ProfileError: the model has not one symbolic size, or is another one.
    """
    if len(symbolic.symbols) != 1:
        found = ", ".join(sorted(symbolic.symbols)) or "none"
        do = "explain it with torch._dynamo.mark_dynamic(input, 0) on the inputs whose first side is the batch"
        raise ProfileError(f"the model is to have one symbolic size, its batch, and has {found}", do=do)
    if [op.id for op in symbolic.operators] != [op.id for op in part.graph.operators]:
        strange = next(
            iter({op.id for op in symbolic.operators} ^ {op.id for op in part.graph.operators}), "their order"
        )
        what = f"with the batch as a symbol the model has other operators: {shown(strange)}"
        raise ProfileError(what, do="compare with batches that need no other trace")
    (symbol,) = symbolic.symbols
    graph = symbolic.at(**{symbol: batch})
    before = part.times
    times: Times = before.of(graph) if isinstance(before, DeviceTimes) else Scaled(before, part.graph, graph)
    return replace(part, graph=graph, times=times, anchors=(), training=_trained(part.training, part.graph, graph))


def _trained(training: Training | None, before: ModelGraph, after: ModelGraph) -> Training | None:
    """What a loss takes follows what the model returns."""
    if training is None or training.loss is None or (held := _returned(before)) == (now := _returned(after)):
        return training
    if not held:
        return replace(training, loss=None)
    loss = LossMemory(*(-(-size * now // held) for size in (training.loss.held, training.loss.most)))
    return replace(training, loss=loss)


def _returned(graph: ModelGraph) -> int:
    return sum(whole(graph.values[read.value].numel) for read in graph.outputs)


@dataclass(frozen=True)
class Scaled:
    """
    Attributes:
        times: with the batch that was measured.
        before: the model with that batch.
        after: the model with another one.
    """

    times: Times = field(repr=False)
    before: ModelGraph = field(repr=False)
    after: ModelGraph = field(repr=False)

    def operator(self, operator: str, state: State, around: Sequence[State | None]) -> Seconds:
        found, more = self.times.operator(operator, state, around), self._more(operator, state)
        return Seconds(found.forward * more, found.backward * more, interpolated=True)

    def least(self, operator: str, state: State, beside: Beside = ANYBODY) -> Seconds:
        found, more = self.times.least(operator, state, beside), self._more(operator, state)
        return Seconds(found.forward * more, found.backward * more, interpolated=True)

    def told_apart(self, operator: str, state: State) -> Sequence[Collection[StateNames] | None]:
        return self.times.told_apart(operator, state)

    def cast(self, operator: str, before: str, after: str, numel: int, differentiated: bool) -> Seconds:
        return self.times.cast(operator, before, after, numel, differentiated)

    def outside(self) -> Seconds:
        return self.times.outside()

    def optimizer(self) -> float:
        return self.times.optimizer()

    def _more(self, operator: str, state: State) -> float:
        before, after = (graph.operator(operator).costs[state.names].work for graph in (self.before, self.after))
        if before.flops:
            return float(after.flops) / float(before.flops)
        return float(after.bytes) / float(before.bytes) if before.bytes else 1.0
