"""Plan files, of one plan or of a cluster's: what stands in one, how it is written, and what their errors call it.

A plan is data from elsewhere: another rank, another machine, a web page.
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
    """The fields of a plan, which `Plan` checks itself: from Python come others as wrong as from files."""

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
    """The fields of a plan for a cluster, which `ClusterPlan` checks itself."""

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
    """Returns a JSON object or list that begins with `opening`, an entry a line."""
    closing = "}" if opening.endswith("{") else "]"
    body = ",\n".join(textwrap.indent(entry, "  ") for entry in entries)
    return f"{opening}\n{body}\n{closing}" if body else opening + closing


def texts_block(name: str, texts: Mapping[str, str]) -> str:
    """Returns the field of a JSON object that holds texts by name, in their order."""
    return block(
        f'"{name}": {{',
        (f"{json.dumps(key)}: {json.dumps(text)}" for key, text in sorted(texts.items())),
    )


def notes_of(value: object) -> dict[str, str]:
    """Returns what is given as notes; raises `PlanError` where it cannot be."""
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
