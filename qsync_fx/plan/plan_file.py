"""Plan files: what stands in one, and what their errors call it.

A plan is data from elsewhere: another rank, another machine, a web page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qsync_fx.codec import Schema
from qsync_fx.errors import PlanError


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
    remedy="write plans with Plan.save",
    name="qsync-plan",
    smaller="use patterns in place of single operators",
)
