"""Plans in which all operators of a class of devices are asked for one format.

Invariant: each is one that `Problem.uniform` makes; the first is that of the narrowest format of each class.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_fx.allocator.problem import Plans, Problem, width


def uniforms(problem: Problem) -> Mapping[str, Plans]:
    """Returns uniform plans by the format asked for, from the narrowest up, of those that all open classes have.

    Where classes have different ones, that of each class's narrowest format comes first, under the names of all of these.
    """
    parts = [problem.classes[name] for name in problem.open]
    lowest = sorted({part.lowest for part in parts}, key=width)
    common = sorted(set.intersection(*(set(part.formats) for part in parts)), key=width)
    found = {} if common[:1] == lowest else {"/".join(lowest): problem.uniform()}
    return found | {fmt: problem.uniform(fmt) for fmt in common}
