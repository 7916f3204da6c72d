"""Tabs of profiles and sensitivities: timeline, memory, trust and sensitivity."""

from __future__ import annotations

from typing import Any

from qsync_fx.formats import FORMATS
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.cost_mapper.plan_states import states
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.memory.peak_memory import step_memory
from qsync_fx.profiler.profile import Profile, anchors
from qsync_fx.report.plan_tabs import add_memory, add_timeline, add_trust
from qsync_fx.timeline.device_profiles import training_of
from qsync_fx.timeline.replay_plans import replay


def add_profile(tabs: Any, profile: Profile, name: str, planned: bool) -> None:
    """Add the tabs of a profile.

    Args:
        tabs: the tabs.
        profile: measured or predicted profile of one device.
        name: its device class; "" for none.
        planned: whether a planning result fills the other tabs, so that only the comparison of
            predictions and measurements is added.
    """
    label = name or profile.machine.name
    _add_trust(tabs, profile, label)
    if planned:
        return
    _add_summary(tabs, profile, label)
    uniform = [fmt for fmt in profile.precisions if fmt in profile.graph.formats]
    training = training_of(profile, sends=False)
    for fmt in uniform:
        plan = Plan.uniform(fmt)
        add_timeline(tabs, replay(plan, profile, any_machine=True), f"{label}, {fmt}")
        memory = step_memory(states(profile.graph, plan), training)
        add_memory(tabs, memory, f"{label}, {fmt}", None, memory.peak.bytes)
    if profile.sensitivity is not None:
        add_sensitivity(tabs, profile.sensitivity, label, profile)


def _add_summary(tabs: Any, profile: Profile, label: str) -> None:
    summary = tabs.summary()
    summary["sentences"].append(f"Profile of {profile.model} on {label}.")
    for run in profile.runs:
        note = "both passes, predicted"
        if profile.fingerprint is not None:
            note = f"both passes, {len(run.steps)} measured steps, spread {run.spread:.1%}"
        fact = {"label": f"{label}, {run.label}", "seconds": run.passes, "note": note}
        summary["facts"].append(fact)


def _add_trust(tabs: Any, profile: Profile, label: str) -> None:
    """Add the predicted and the measured peak memory of each run; a catalog profile has none."""
    if profile.fingerprint is None:
        return
    training = training_of(profile, sends=False)
    for run, anchor in zip(profile.runs, anchors(profile), strict=True):
        predicted = step_memory(anchor.states, training).step_bytes
        text = f"{label}, {run.label}: peak memory"
        add_trust(tabs, text, "bytes", predicted, anchor.step_bytes)


def add_sensitivity(
    tabs: Any, sensitivity: Sensitivity, name: str, profile: Profile | None = None
) -> None:
    """Add the variance of each operator, and the time that a format saves if a profile has it."""
    tab = tabs.setdefault("sensitivity", {"devices": []})
    if any(item["name"] == name for item in tab["devices"]):
        return
    saved = {} if profile is None else _saved_seconds(profile)
    points = [
        [operator, fmt, variance, saved.get((operator, fmt)), None]
        for operator, by_format in sensitivity.variance.items()
        for fmt, variance in by_format.items()
    ]
    tab["devices"].append({"name": name or sensitivity.model, "points": points})
    if "summary" not in tabs:
        text = f"Sensitivity of {sensitivity.model}, method {sensitivity.method}."
        tabs.summary()["sentences"].append(text)


def _saved_seconds(profile: Profile) -> dict[tuple[str, str], float]:
    """Return the seconds that an operator saves in a format, compared with the widest run."""
    runs = {run.label: run for run in profile.runs if run.label in profile.precisions}
    if not runs:
        return {}
    widest = runs[max(runs, key=lambda fmt: FORMATS[fmt].bits)]
    before = {item.operator: item.seconds for item in widest.operators}
    return {
        (item.operator, fmt): before[item.operator] - item.seconds
        for fmt, run in runs.items()
        for item in run.operators
    }
