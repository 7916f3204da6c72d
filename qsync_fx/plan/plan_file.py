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
    remedy="write plans with Plan.save; read plans for a cluster with ClusterPlan.load",
    name="qsync-plan",
    smaller="use patterns instead of single operators",
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
    smaller="use patterns instead of single operators",
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
            f"notes must be a mapping, not {kind(value)}",
            where="notes",
            do='write {"made by": "..."}',
        )
    for name, text in value.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise PlanError(
                f"a note must map a string to a string, not to {kind(text)}"
                if isinstance(name, str)
                else "the name of a note must be a string",
                where=f"notes[{json.dumps(str(name)[:120])}]",
                do="convert names and values to strings",
            )
    return dict(value)
