"""The options of the backend (first cut, so that others can run; the engineer of plans and options replaces this file)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qsync_fx.errors import OptionError, nearest
from qsync_fx.plan import Plan
from qsync_fx.precision import precision as find_precision


@dataclass(frozen=True)
class Options:
    precision: str | None = None
    plan: Plan | None = None
    inner: str = "inductor"
    rounding: str = "stochastic"
    scaling: str = "tensor"
    exact: bool = False
    passes: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, mapping: Mapping[str, object] | None) -> Options:
        given: dict[str, Any] = dict(mapping or {})
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise OptionError(f"unknown option {name!r}", do=nearest(name, names))
        if isinstance(given.get("plan"), (str, os.PathLike)):
            given["plan"] = Plan.load(given["plan"])
        if given.get("precision") is not None:
            given["precision"] = find_precision(given["precision"]).name
        given["passes"] = tuple(given.get("passes", ()))
        return cls(**given)
