"""Operators get wider formats again, those first that add most to the variance in the ones that they have.

Each class of devices has a heap of its units by Omega(b) - Omega(next higher b). Classes take turns: the unit on top of the heap is
widened, which is taken back where it breaks a limit; else it is put into the heap again with its next format.

Invariant: where the judge said that limits are kept it says so afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from qsync_fx.allocator.judging.judge import Judge
from qsync_fx.allocator.paper.units import Unit

Indicator = Callable[[str, str, str], float]
"""What an operator of a class adds in a format, by the class's name, its id and the format."""

_Entry = tuple[float, int, str]
"""Minus what is gained, the unit's place, and its next format."""


def recover(
    judge: Judge,
    units: Mapping[str, Sequence[Unit]],
    indicator: Indicator,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Widens what can be widened within the judge's limits.

    Args:
        judge: of the plans to start from; it is changed.
        units: of each class that is open to choice.
        indicator: what the heaps are ordered by.
        enough: asked after each change that is kept; where it says so, nothing more is changed.
    """
    asked = judge.plans

    def next_of(name: str, at: int) -> list[_Entry]:
        unit = units[name][at]
        now = unit.formats.index(asked[name][unit.operators[0]])

        def omega(fmt: str) -> float:
            return sum(indicator(name, operator, fmt) for operator in unit.operators)

        # Formats of as many bits may add more, not less: none of those is higher.
        gains = ((omega(unit.formats[now]) - omega(fmt), fmt) for fmt in unit.formats[now + 1 :])
        return [(-gain, at, fmt) for gain, fmt in gains if gain > 0][:1]

    heaps = {name: [entry for at in range(len(own)) for entry in next_of(name, at)] for name, own in units.items()}
    for heap in heaps.values():
        heapq.heapify(heap)
    while any(heaps.values()):
        for name, heap in heaps.items():
            if not heap:
                continue
            _, at, fmt = heapq.heappop(heap)
            changed = units[name][at].operators
            for operator in changed:
                judge.set(name, operator, fmt)
            if judge.fits():
                asked[name].update(dict.fromkeys(changed, fmt))
                for entry in next_of(name, at):
                    heapq.heappush(heap, entry)
                if enough():
                    return
            else:
                for _ in changed:
                    judge.undo()
