"""Formats and states by the names that model graphs know them by, and back.

Invariant: None is the name of no format.
"""

from __future__ import annotations

import functools

from qsync_fx.graph.reads import State
from qsync_fx.precision import FORMATS, Precision
from qsync_fx.predictor.model.value import Name, StateNames


def format_named(name: Name) -> Precision | None:
    """Returns a format by its name."""
    return FORMATS[name] if name is not None else None


def name_of(fmt: Precision | None) -> Name:
    """Returns the name of a format."""
    return fmt.name if fmt is not None else None


@functools.cache
def state_named(names: StateNames) -> State:
    """Returns a state by the names of its formats."""
    return State(format_named(names[0]), format_named(names[1]))
