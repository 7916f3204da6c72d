"""The formats of all operators, followed as one of them is changed.

Invariant: after any number of changes they equal what the rules give for the same plan at once. What a scaled operator gives out depends on
who reads it and widens none of those, so formats are followed twice: as if none gave out anything wide, and then as it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from qsync_fx.predictor.mapper.tables import BASE, REACH, SCALED, Tables


class Following:
    """
    Args:
        chosen: what each adjustable operator computes in, by its place.

    Attributes:
        precisions, outputs: by operator, what it computes in and gives out; behind the last one stands the model's caller.
        codes: both as one number, between two of none on either side.
    """

    def __init__(self, tables: Tables, chosen: Mapping[int, int]) -> None:
        count = len(tables.inputs)
        self.tables = tables
        self.precisions, self.outputs, self.codes = [0] * (count + 1), [0] * (count + 1), [0] * (count + 2 * REACH)
        self._narrow, self._narrow_out = [0] * (count + 1), [0] * (count + 1)
        self._wide = [False] * count
        for at, outputs in enumerate(tables.outputs):
            if outputs is not None:
                found = chosen[at], outputs[chosen[at]]
            else:
                found = self._followed(at, self._narrow_out)
            self._narrow[at], self._narrow_out[at] = found
        for at in range(count):
            self._wide[at] = self._is_wide(at)
            self._settle(at)

    def chosen(self, at: int) -> int:
        """Returns what an adjustable operator computes in."""
        return self._narrow[at]

    def change(self, at: int, precision: int) -> list[int]:
        """Gives an adjustable operator another format; returns the operators whose formats have changed."""
        changed: list[int] = []
        if self._narrow[at] == precision:
            return changed
        outputs, followers = self.outputs, self.tables.followers
        todo = self._spread(at, precision)
        while todo:
            now = heapq.heappop(todo)
            before = outputs[now]
            if self._settle(now):
                changed.append(now)
                if outputs[now] != before:
                    for follower in followers[now]:
                        heapq.heappush(todo, follower)
        return changed

    def _spread(self, first: int, precision: int) -> list[int]:
        """Follows a change as if no scaled operator gave out anything wide; returns those that may have to settle anew, as a heap."""
        tables, narrow, out = self.tables, self._narrow, self._narrow_out
        outputs = tables.outputs[first]
        assert outputs is not None, "adjustable operators have outputs"
        narrow[first] = precision
        looked, asked = [first], [first, *tables.widens[first]]
        todo: list[int] = []
        if out[first] != outputs[precision]:
            out[first] = outputs[precision]
            todo += tables.followers[first]
        while todo:
            at = heapq.heappop(todo)
            found, result = self._followed(at, out)
            if found == narrow[at] and result == out[at]:
                continue
            looked.append(at)
            if found != narrow[at]:
                narrow[at] = found
                asked += tables.widens[at]
            if result != out[at]:
                out[at] = result
                for follower in tables.followers[at]:
                    heapq.heappush(todo, follower)
        for at in asked:
            if tables.wide[at] and self._is_wide(at) != self._wide[at]:
                self._wide[at] = not self._wide[at]
                looked.append(at)
        heapq.heapify(looked)
        return looked

    def _settle(self, at: int) -> bool:
        """Gives an operator its formats; returns whether they are others than before."""
        if self.tables.outputs[at] is None:
            precision, output = self._followed(at, self.outputs)
        else:
            precision = self._narrow[at]
            output = self.tables.wide[at] if self._wide[at] else self._narrow_out[at]
        code = precision + BASE * output
        if code == self.codes[at + REACH]:
            return False
        self.codes[at + REACH], self.precisions[at], self.outputs[at] = code, precision, output
        return True

    def _followed(self, at: int, outputs: list[int]) -> tuple[int, int]:
        known, key = self.tables.follow[at], 0
        assert known is not None, "others are chosen"
        for used in self.tables.inputs[at]:
            key = key * BASE + outputs[used]
        return known[key]

    def _is_wide(self, at: int) -> bool:
        wide, narrow = self.tables.wide[at], self._narrow
        return bool(wide) and SCALED[narrow[at]] and all(w[narrow[r]] for r, w in self.tables.wide_readers[at])
