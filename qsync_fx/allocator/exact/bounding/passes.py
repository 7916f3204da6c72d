"""Both passes of a plan as the judge of plans has them, and what the second reads of the first.

Invariant: says what is read of buffers that the forward pass writes, of nothing that is there before the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qsync_fx.predictor.mapper import States
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import Buffer
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.model.value import StateNames


class Passes:
    """Both passes of a plan, and what the second reads of the first."""

    def __init__(self, found: States) -> None:
        self.forward = Forward(found)
        self.backward = Backward(self.forward)
        self.made = {buffer for task in self.forward.tasks for buffer in task.writes}
        self.read = self.made & {buffer for task in self.backward.tasks for buffer in task.reads}

    def reads_factor(self, at: int, place: int) -> bool:
        """Whether the factor of a product is read again; of one that is there before the step, nothing is held."""
        if (at, place) not in self.forward.factors:
            return False
        buffer = self.forward.factors[at, place]
        return buffer is None or buffer in self.read

    def reads_kept(self, at: int, name: str) -> bool:
        """Whether what an operator keeps of a value is read again."""
        return any(buffer.name == name and buffer in self.read for buffer in self.forward.kept.get(at, ()))

    def mask(self, at: int) -> Buffer | None:
        """Returns what the gate at a place keeps in place of its result; None where that is kept, or computed again."""
        name = self.forward.graph.values[self.forward.graph.operators[at].result].name
        kept = self.forward.kept.get(at, ())
        return next((one for one in kept if one.name == name and one.format is None), None)

    def reads_gate(self, at: int) -> bool:
        """Whether what the gate at a place keeps is read again; of several that its result is computed from, some."""
        mask = self.mask(at)
        return not self.read.isdisjoint(self.forward.kept.get(at, ()) if mask is None else [mask])

    def extras(self, at: int) -> Mapping[str, int]:
        """Returns the bytes of what an operator keeps beside values and reads again, by name."""
        return {buffer.name: buffer.bytes for buffer in self.forward.extras(at) if buffer in self.read}


def extras_kept(passes: Sequence[Passes], at: int) -> Mapping[StateNames, int]:
    """By state, the bytes of masks and statistics that an operator keeps: what it does in that state, or in all that were seen."""
    known = [one.extras(at) for one in passes]
    least = sum(min(one.get(name, 0) for one in known) for name in known[0])
    seen: dict[StateNames, int] = {}
    for one, sizes in zip(passes, known, strict=True):
        state = one.forward.states.names[at]
        seen[state] = min(seen.get(state, sum(sizes.values())), sum(sizes.values()))
    return {state: seen.get(state, least) for state in passes[0].forward.graph.operators[at].costs}
