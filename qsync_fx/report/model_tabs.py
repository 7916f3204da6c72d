"""Tabs of a plan file and of the coverage of a training model."""

from __future__ import annotations

from typing import Any

from qsync_fx.diagnostics.coverage_report import PlanCoverage
from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.formatting import many
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import Plan


def add_plan(
    tabs: Any, plan: Plan | ClusterPlan, name: str, explanation: Explanation | None
) -> None:
    """Add a plan: the format of each operator that it names, or that the explanation has."""
    classes = plan.classes if isinstance(plan, ClusterPlan) else {name or "plan": plan}
    ids: list[OpId] = []
    if explanation is not None:
        ids = [operator.id for operator in explanation.adjustable]
    else:
        ids = list(dict.fromkeys(op for part in classes.values() for op in part.operators))
    layers = [
        {"id": str(op), "cells": [_cell(part, op) for part in classes.values()]} for op in ids
    ]
    if "plan" not in tabs and layers:
        devices = [{"name": device, "count": None} for device in classes]
        tabs["plan"] = {"devices": devices, "layers": layers}
    summary = tabs.summary()
    for device, part in classes.items():
        if part.default is not None:
            text = f"{device}: operators without an entry run in {part.default}."
            summary["sentences"].append(text)
        summary["details"] += [
            f'{device}: pattern "{pattern}" runs in {fmt}' for pattern, fmt in part.patterns
        ]
        summary["details"] += [f"{device}: {note}: {text}" for note, text in part.notes.items()]
    if isinstance(plan, ClusterPlan) and plan.codecs:
        text = f"The gradients of {many(len(plan.codecs), 'parameter')} are compressed."
        summary["sentences"].append(text)
    if not summary["sentences"]:
        text = f"The plan has formats for {many(len(layers), 'operator')}."
        summary["sentences"].append(text)


def _cell(plan: Plan, operator: OpId) -> list[Any] | None:
    choice = plan.precision_for(operator)
    return None if choice is None else [str(choice.precision), None, [], choice.reason]


def add_coverage(tabs: Any, coverage: PlanCoverage) -> None:
    """Add the planned and the running format of each operator in compiled code."""
    layers = []
    for item in coverage.operators:
        running = None if item.precision is None else str(item.precision)
        planned = running if item.planned is None else str(item.planned)
        cells: list[list[Any] | None] = [
            None if fmt is None else [fmt, None, [], item.reason] for fmt in (planned, running)
        ]
        layers.append({"id": str(item.id), "cells": cells, "line": item.line})
    if layers:
        devices = [{"name": "planned", "count": None}, {"name": "running", "count": None}]
        tabs["plan"] = {"devices": devices, "layers": layers}
    summary, missing = tabs.summary(), coverage.uncovered
    count = len(coverage.modules)
    compiled = f"{count - len(missing)} of {many(count, 'module')} run in compiled code"
    summary["sentences"].append(f"{coverage.model}: {compiled}.")
    complete = "applies the full plan" if coverage.complete else "does not apply the full plan"
    summary["sentences"].append(f"The code that has run {complete}.")
    summary["details"] += [
        f"{module.path} ({module.type}): {module.cause.reason}" for module in missing
    ]
