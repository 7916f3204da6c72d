"""What there is to know about a plan that was found: limits that bind, operators that stay wide, devices that do not help.

Invariant: says what the judge says of plans beside the one that was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.judging.judge import Judge
from qsync_fx.allocator.problem import Problem, width
from qsync_fx.communication.speeds.foreseen import by_bucket
from qsync_fx.predictor.replay.fleet import played

NEAR: Final = 0.02
"""How near to a limit, of it, a plan is that the limit binds."""
LONG: Final = 0.1
"""Of a step, how long a device waits for gradients that this is worth a word."""


def looked(answer: Answer) -> Iterator[Note]:
    """Yields what there is to know."""
    judge = Judge(answer.problem, answer.plans, answer.judged.codecs)
    yield from _binding(answer)
    yield from _waiting(answer)
    if answer.codecs and (size := answer.problem.cluster.nodes.ranks) > 1:
        yield Note(NoteKind.BETWEEN_NODES, numbers={"ranks a node": float(size)})
    yield from _joining(answer, judge)
    for name in answer.problem.open:
        yield from _not_faster(answer, judge, name)


def _binding(answer: Answer) -> Iterator[Note]:
    """The limits that the plan comes near to, where there is anything to win beyond them."""
    problem, judged = answer.problem, answer.judged
    if problem.least == "variance" and not any(judged.classes[name].variance for name in problem.open):
        return
    values = [("", "seconds", judged.seconds, problem.seconds), ("", "variance", judged.variance, problem.variance)]
    for name in problem.open:
        values.append((name, "memory", float(judged.classes[name].peak_bytes or 0), problem.classes[name].memory))
    for name, what, value, limit in values:
        if limit and value > limit * (1 - NEAR):
            yield Note(NoteKind.BINDS, name, numbers={what: value, "limit": limit})


def _waiting(answer: Answer) -> Iterator[Note]:
    """The classes that wait for gradients to travel, where no codecs were allowed, and any could win."""
    cluster = answer.problem.cluster
    if answer.problem.coding is not None or cluster.ranks == cluster.nodes.ranks:
        return
    for name, figures in answer.judged.classes.items():
        if figures.sending > LONG * answer.judged.seconds:
            yield Note(
                NoteKind.WAITS, name, numbers={"seconds": figures.sending, "of a step of": answer.judged.seconds}
            )


def _joining(answer: Answer, judge: Judge) -> Iterator[Note]:
    """Whether the run makes more samples a second with each class than without it, taking batches to be equal where none is known."""
    problem = answer.problem
    if len(problem.classes) == 1:
        return
    rate = _samples(problem, list(problem.classes)) / answer.judged.seconds
    for name in problem.open:
        others = [other for other in problem.classes if other != name]
        if sum(problem.cluster.devices[other].count for other in others) % problem.cluster.nodes.ranks:
            continue  # they make no whole nodes, and between what others are nothing was measured
        alone = replace(problem.cluster, devices={other: problem.cluster.devices[other] for other in others})
        own = {other: judge.schedules()[other] for other in others}
        coding = problem.coding
        how = None if coding is None else by_bucket(own, alone, answer.codecs, coding.rates)
        seconds = float(played(own, alone, how).step.seconds)
        without = _samples(problem, others) / seconds
        kind = NoteKind.JOINS if rate > without else NoteKind.DOES_NOT_HELP
        yield Note(kind, name, numbers={"samples a second": rate, "without it": without})


def _samples(problem: Problem, names: list[str]) -> float:
    devices = problem.cluster.devices
    known = all(device.batch is not None for device in devices.values())
    return float(sum(devices[name].count * ((devices[name].batch or 1) if known else 1) for name in names))


def _not_faster(answer: Answer, judge: Judge, name: str) -> Iterator[Note]:
    """The operators that keep a wider format where no narrower one is faster on this device."""
    part, before = answer.problem.classes[name], judge.computing(name)
    for operator, asked in answer.plans[name].items():
        narrower = [fmt for fmt in part.choices[operator] if width(fmt) < width(asked)]
        more = {}
        for fmt in narrower:
            judge.set(name, operator, fmt)
            more[fmt] = judge.computing(name) - before
            judge.undo()
        if more and min(more.values()) >= 0:
            best = min(more, key=lambda fmt: more[fmt])
            yield Note(NoteKind.NOT_FASTER, name, operator, (best, asked), {"seconds more": more[best]})
