"""JSON files of plans and cluster plans: schemas, writers, names in error messages.

A plan file is untrusted input: it may come from another rank or machine.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qsync_fx.errors import PlanError
from qsync_fx.serialization import Schema, kind


@dataclass(frozen=True)
class Fields:
    """Fields of a plan file; `Plan` validates them, as it does values from Python."""

    default: Any = None
    patterns: Any = ()
    operators: Any = field(default_factory=dict)
    notes: Any = field(default_factory=dict)


PLAN = Schema(
    Fields,
    noun="plan",
    error=PlanError,
    remedy="write plans with Plan.save; ClusterPlan.load reads those for a cluster",
    name="qsync-plan",
    smaller="use patterns in place of single operators",
)


@dataclass(frozen=True)
class ClusterFields:
    """Fields of a cluster plan's file; `ClusterPlan` validates them."""

    classes: Any = field(default_factory=dict)
    devices: Any = field(default_factory=dict)
    ranks: Any = ()
    notes: Any = field(default_factory=dict)
    codecs: Any = field(default_factory=dict)


CLUSTER_PLAN = Schema(
    ClusterFields,
    noun="plan",
    error=PlanError,
    remedy="write plans for clusters with ClusterPlan.save",
    name="qsync-cluster-plan",
    largest=4 * PLAN.largest,
    smaller="use patterns in place of single operators",
)


def block(opening: str, entries: Iterable[str]) -> str:
    """Return a JSON object or list that begins with `opening`, one entry per line."""
    closing = "}" if opening.endswith("{") else "]"
    body = ",\n".join(textwrap.indent(entry, "  ") for entry in entries)
    return f"{opening}\n{body}\n{closing}" if body else opening + closing


def texts_block(name: str, texts: Mapping[str, str]) -> str:
    """Return a JSON field with an object of texts, sorted by name."""
    return block(
        f'"{name}": {{',
        (f"{json.dumps(key)}: {json.dumps(text)}" for key, text in sorted(texts.items())),
    )


def notes_of(value: object) -> dict[str, str]:
    """Return notes as a dictionary; raise `PlanError` if they are invalid."""
    if not isinstance(value, Mapping):
        raise PlanError(
            f"notes are a mapping, not {kind(value)}", where="notes", do='write {"made by": "..."}'
        )
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise PlanError(
                "a note is text by name",
                where=f"notes[{json.dumps(str(name)[:120])}], {kind(text)}",
                do="turn numbers and lists into text",
            )
    return dict(value)
