"""Steps of several ranks, put together again.

A collective begins on a rank when that rank is ready and ends on all at once, so what a trace shows of it holds waiting for others. The
rank that came last waited for none: the shortest duration of all ranks is how long it travels, however their clocks differ.

Invariant: each rank is there once, all did the same all-reduces, and the step is the same one on all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from qsync_fx.codec import Path
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Device
from qsync_fx.predictor.replay.fleet import Played, played
from qsync_fx.predictor.replay.traces.execution import execution_trace, sizes
from qsync_fx.predictor.replay.traces.kineto import kineto
from qsync_fx.predictor.replay.traces.traced import Traced, steps

_DO = "give the traces of one run, one of each rank"


def read_steps(path: Path, execution: Path | None = None) -> list[Traced]:
    """Returns the steps of one rank's trace of Kineto, with the execution trace of the same run where there is one.

    Raises:
        ProfileError: a file is no such trace, is cut off or damaged, or holds no training step.
    """
    trace = kineto(path)
    return steps(trace, None if execution is None else sizes(execution_trace(execution), trace))


def common_step(ranks: Sequence[Sequence[Traced]]) -> list[Traced]:
    """Returns the step of median length among those that all ranks have, by its longest rank."""
    every = [{step.name: step for step in found} for found in ranks]
    names = [name for name in every[0] if all(name in one for one in every)]
    if not names:
        what = f"no step is in all traces: {', '.join(every[0])} and {', '.join(every[-1])}"
        raise ProfileError(what, where=shown(ranks[-1][0].path), do="profile the same steps on all ranks")
    seconds = {name: max(one[name].seconds for one in every) for name in names}
    middle = statistics.median_low(seconds.values())
    chosen = next(name for name in names if seconds[name] == middle)
    return [one[chosen] for one in every]


def travelling(ranks: Sequence[Traced]) -> list[float]:
    """Returns the seconds that each all-reduce of a step takes once all ranks are there."""
    first = ranks[0]
    for one in ranks[1:]:
        if [(sent.elements, sent.element_bytes) for sent in one.sent] != [
            (sent.elements, sent.element_bytes) for sent in first.sent
        ]:
            what = f"the ranks {first.rank} and {one.rank} send different gradients in {first.name}"
            raise ProfileError(what, where=f"{shown(first.path)} and {shown(one.path)}", do=_DO)
    return [min(sent.seconds for sent in same) for same in zip(*(one.sent for one in ranks), strict=True)]


def played_traces(traces: Mapping[str, Sequence[Traced]], cluster: Cluster | None = None) -> Played:
    """Returns a step of the run that was traced; with a cluster, that step on its links, devices and numbers of them.

    Args:
        traces: steps of one rank by name; with a cluster, of one rank of each class of devices. A run that was traced on one rank alone
            is taken to be alike on all, and its all-reduces for as long as they seemed.
        cluster: what to replay them on; None for what was traced.
    """
    found = dict(zip(traces, common_step(list(traces.values())), strict=True))
    ranks = [one.rank for one in found.values()]
    if cluster is None and len(set(ranks)) != len(ranks):
        again = next(one for one in found.values() if ranks.count(one.rank) > 1)
        raise ProfileError(f"rank {again.rank} is there twice", where=shown(again.path), do=_DO)
    if cluster is None:
        (most, *others) = {one.ranks for one in found.values()}
        if others or len(found) not in (1, most):
            what = f"there are traces of {len(found)} ranks of {max(most, *others, 0)}"
            raise ProfileError(what, where=", ".join(shown(one.path) for one in found.values()), do=_DO)
        cluster = Cluster({name: Device(count=most if len(found) == 1 else 1) for name in found})
        transfer = travelling(list(found.values())) if most > 1 else []
    else:
        travelling(list(found.values()))
        transfer = None
    count = len(next(iter(found.values())).sent) if cluster.ranks > 1 else 0
    schedules = {name: one.schedule for name, one in found.items()}
    return played(schedules, cluster, indices=[[at] for at in range(count)], transfer=transfer)
