"""Tabs of a planning result: summary, plan, timeline, sensitivity, memory, trust, trade-off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from qsync_fx.allocator.analysis import ParetoFront
from qsync_fx.allocator.evaluator import Evaluation, PlanEvaluator
from qsync_fx.allocator.plan_result import (
    PlanResult,
    bound_line,
    limit_lines,
    note_lines,
    variance_share,
)
from qsync_fx.allocator.problem import Problem, width
from qsync_fx.formatting import duration, many
from qsync_fx.predictor.memory.peak_memory import StepMemory
from qsync_fx.timeline.timeline import Timeline, TimelinePiece

_IDLE: Final = 0.01
"""Share of a step below which waiting is not worth a sentence."""
_MOST_MOMENTS: Final = 1500
"""Moments of a memory chart; of more, neighbours are combined to the one with more bytes."""


def add_result(tabs: Any, answer: PlanResult) -> None:
    """Add all tabs for which a planning result has data."""
    problem = answer.problem
    widest = problem.completed({name: _widest(problem, name) for name in problem.open})
    before = PlanEvaluator(problem, widest)
    after = PlanEvaluator(problem, answer.plans, answer.evaluation.codecs)
    _add_summary(tabs, answer, before.evaluate())
    _add_plan(tabs, answer)
    add_timeline(tabs, after.timeline, "this plan")
    formats = "/".join(dict.fromkeys(problem.classes[name].widest for name in problem.open))
    add_timeline(tabs, before.timeline, f"all operators in {formats}")
    _add_sensitivity(tabs, answer, before)
    for name in problem.classes:
        memory = after.memory(name)
        if memory is not None:
            limit = problem.classes[name].memory
            add_memory(tabs, memory.worst, name, limit, memory.peak_bytes)
    _add_trials(tabs, answer)


def _widest(problem: Problem, name: str) -> dict[str, str]:
    part = problem.classes[name]
    return part.uniform(part.widest)


def _add_summary(tabs: Any, answer: PlanResult, before: Evaluation) -> None:
    summary, problem, evaluation = tabs.summary(), answer.problem, answer.evaluation
    facts = summary["facts"]
    saved = before.seconds / evaluation.seconds if evaluation.seconds else 1.0
    facts.append(
        {
            "label": "step",
            "seconds": evaluation.seconds,
            "note": f"{saved:.2f} times as fast as in the widest formats",
        }
    )
    label, note = "variance added to the gradients", variance_share(answer)
    facts.append({"label": label, "number": evaluation.variance, "note": note})
    for name, metrics in evaluation.classes.items():
        part = problem.classes[name]
        summary["devices"].append(
            {
                "name": name,
                "count": problem.cluster.devices[name].count,
                "computing": metrics.computing,
                "waiting": metrics.waiting,
                "sending": metrics.sending,
                "peak_bytes": metrics.peak_bytes,
                "memory": part.memory,
                "variance": metrics.variance,
            }
        )
    longest = max(evaluation.classes.values(), key=lambda item: item.waiting).waiting
    if len(evaluation.classes) > 1:
        note = "of a device, per step"
        facts.append({"label": "longest waiting", "seconds": longest, "note": note})
    peaks = [item.peak_bytes for item in evaluation.classes.values() if item.peak_bytes]
    if peaks:
        facts.append({"label": "highest peak memory", "bytes": max(peaks), "note": "of a device"})
    summary["sentences"] += [*map(_sentence, limit_lines(answer)), *_pace(answer)]
    summary["sentences"].append(_sentence(bound_line(answer)))
    summary["details"] += list(note_lines(answer))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _pace(answer: PlanResult) -> list[str]:
    """Return sentences on the devices that set the pace, and those that wait."""
    classes, seconds = answer.evaluation.classes, answer.evaluation.seconds
    if len(classes) < 2:
        return []
    slowest = max(classes, key=lambda name: classes[name].computing)
    if all(metrics.waiting <= _IDLE * seconds for metrics in classes.values()):
        result = ["All device classes keep pace: none waits for another."]
    else:
        computing = duration(classes[slowest].computing)
        result = [f"{slowest} sets the pace with {computing} of computing."]
    for name, metrics in classes.items():
        if name != slowest and metrics.waiting > _IDLE * seconds:
            share = f"{metrics.waiting / seconds:.0%} of a step"
            result.append(f"{name} waits {duration(metrics.waiting)}, {share}.")
    sending = max(metrics.sending for metrics in classes.values())
    if sending > _IDLE * seconds:
        share = f"{sending / seconds:.0%} of a step"
        result.append(f"Devices wait up to {duration(sending)} for gradients, {share}.")
    return result


def _add_plan(tabs: Any, answer: PlanResult) -> None:
    problem = answer.problem
    names = list(problem.classes)
    operators = dict.fromkeys(op for name in names for op in answer.plans[name])
    layers = []
    for operator in operators:
        cells: list[list[Any] | None] = []
        for name in names:
            fmt = answer.plans[name].get(operator)
            if fmt is None:
                cells.append(None)
                continue
            part = problem.classes[name]
            runs = part.runs(operator, fmt)
            cells.append([runs, part.omega(operator, fmt), list(part.choices[operator])])
        layers.append({"id": operator, "cells": cells})
    devices = [{"name": name, "count": problem.cluster.devices[name].count} for name in names]
    tabs["plan"] = {"devices": devices, "layers": layers}


def _add_sensitivity(tabs: Any, answer: PlanResult, before: PlanEvaluator) -> None:
    """Add the variance and the saved time of each operator in each narrower format."""
    devices = []
    for name in answer.problem.open:
        part, base = answer.problem.classes[name], before.computing(name)
        points = []
        for operator, choices in part.choices.items():
            for fmt in sorted(choices, key=width)[:-1]:
                before.set(name, operator, fmt)
                saved = base - before.computing(name)
                before.undo()
                chosen = answer.plans[name][operator] == fmt
                runs = part.runs(operator, fmt)
                points.append([operator, runs, part.omega(operator, fmt), saved, chosen])
        devices.append({"name": name, "points": points})
    if any(item["points"] for item in devices):
        tabs["sensitivity"] = {"devices": devices}


def add_memory(
    tabs: Any, memory: StepMemory, name: str, limit: float | None, peak_bytes: int
) -> None:
    """Add the live bytes of a device class over a step to the memory tab."""
    series: dict[str, int] = {}
    rows: list[tuple[str, str, dict[int, int], int]] = []
    for moment in memory.moments:
        row: dict[int, int] = {}
        for (category, fmt), size in moment.kinds.items():
            label = f"{category}, {fmt}" if fmt else str(category)
            index = series.setdefault(label, len(series))
            row[index] = row.get(index, 0) + size
        rows.append((moment.place, moment.operator, row, moment.bytes))
    step = -(-len(rows) // _MOST_MOMENTS)
    merged = [
        max(rows[begin : begin + step], key=lambda row: row[3])
        for begin in range(0, len(rows), step)
    ]
    labels = list(series)
    tabs.setdefault("memory", {"devices": []})["devices"].append(
        {
            "name": name,
            "limit": limit,
            "peak_bytes": peak_bytes,
            "series": labels,
            "moments": [
                [place, operator, [row.get(index, 0) for index in range(len(labels))]]
                for place, operator, row, _ in merged
            ],
        }
    )


def _add_trials(tabs: Any, answer: PlanResult) -> None:
    for index, trials in enumerate(answer.trials, 1):
        for trial in trials:
            plan = "this plan" if index == answer.ran else "another plan"
            add_trust(
                tabs,
                f"{trial.device}, round {index}, {plan}",
                "seconds",
                trial.predicted,
                trial.measured,
                trial.spread,
            )


def add_trust(
    tabs: Any, label: str, unit: str, predicted: float, measured: float, spread: float = 0.0
) -> None:
    """Add a prediction and its measurement to the trust tab.

    Args:
        tabs: the tabs.
        label: name of the measured thing.
        unit: "seconds" or "bytes".
        predicted, measured: values in this unit.
        spread: median deviation of the measurements, relative to `measured`.
    """
    points = tabs.setdefault("trust", {"points": []})["points"]
    points.append([label, unit, predicted, measured, spread])


def add_front(tabs: Any, front: ParetoFront) -> None:
    """Add the Pareto front of step time and variance."""
    plans = [(f"point {index}", "front", item) for index, item in enumerate(front.points, 1)]
    plans += [(f"uniform {fmt}", "uniform", item) for fmt, item in front.uniform.items()]
    if front.chosen is not None:
        plans.append(("this plan", "chosen", front.chosen))
    tabs["tradeoff"] = {"points": [_point(*entry) for entry in plans]}


def _point(label: str, kind: str, answer: PlanResult) -> Mapping[str, Any]:
    problem = answer.problem
    plans = {
        name: [problem.classes[name].runs(op, fmt) for op, fmt in answer.plans[name].items()]
        for name in problem.classes
    }
    over = answer.evaluation.exceeds(problem)
    classes = answer.evaluation.classes.items()
    return {
        "label": label,
        "kind": kind,
        "seconds": answer.evaluation.seconds,
        "variance": answer.evaluation.variance,
        "exceeds": many(len(over), "limit") if over else "",
        "operators": {name: list(plan) for name, plan in answer.plans.items()},
        "plans": plans,
        "peaks": {name: metrics.peak_bytes for name, metrics in classes},
        "waiting": {name: metrics.waiting for name, metrics in classes},
    }


def add_timeline(tabs: Any, timeline: Timeline, label: str) -> None:
    """Add a step as a variant of the timeline tab; the tab compares its variants."""
    tab = tabs.setdefault("timeline", {"names": [], "kinds": [], "variants": []})
    tab["variants"].append(
        {
            "label": label,
            "seconds": timeline.seconds,
            "devices": [
                {
                    "name": name,
                    "count": device.count,
                    "computing": _track(tab, timeline.computing[name]),
                    "communicating": _track(tab, timeline.communicating[name]),
                }
                for name, device in timeline.played.cluster.devices.items()
            ],
        }
    )
    if len(tab["variants"]) == 1 and "plan" not in tabs:
        _add_timeline_summary(tabs, timeline, label)


def _track(tab: Any, pieces: Sequence[TimelinePiece]) -> list[list[Any]]:
    """Return the pieces of a track as rows: name, kind, begin and end in microseconds."""
    rows: list[list[Any]] = []
    for piece in pieces:
        if piece.end <= piece.begin:
            continue
        name, kind = _index(tab["names"], piece.name), _index(tab["kinds"], piece.kind)
        rows.append([name, kind, round(piece.begin * 1e6, 2), round(piece.end * 1e6, 2)])
    return rows


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _add_timeline_summary(tabs: Any, timeline: Timeline, label: str) -> None:
    summary = tabs.summary()
    summary["facts"].append({"label": f"step of {label}", "seconds": timeline.seconds})
    if timeline.throughput is not None:
        text = f"{timeline.throughput:.4g} samples per second"
        summary["facts"].append({"label": "throughput", "text": text})
    cluster = timeline.played.cluster
    if summary["devices"]:
        return
    for name, device in cluster.devices.items():
        summary["devices"].append(
            {
                "name": name,
                "count": device.count,
                "computing": timeline.played.devices[name].computed,
                "waiting": timeline.waiting[name],
                "sending": timeline.sending[name],
                "peak_bytes": timeline.peak_bytes.get(name),
                "memory": cluster.bytes_of(name, device.memory or 0) or None,
            }
        )
    if len(timeline.waiting) == 1:
        summary["sentences"].append(f"A step of {label} takes {duration(timeline.seconds)}.")
        return
    for name, waiting in timeline.waiting.items():
        share = (waiting + timeline.sending[name]) / (timeline.seconds or 1.0)
        summary["sentences"].append(f"{name} computes in {1 - share:.0%} of a step.")
