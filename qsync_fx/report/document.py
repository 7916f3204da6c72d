"""Document of a report, its HTML file, and its view in a notebook.

Invariant: all data of a report is one JSON object, marked with `FORMAT` and `VERSION`. A page loads
no other file: its content security policy forbids the browser to do so.
"""

from __future__ import annotations

import functools
import html
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from qsync_fx.allocator.analysis import ParetoFront
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.diagnostics.coverage_report import PlanCoverage
from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.errors import OptionError
from qsync_fx.formats import FORMATS
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.profiler.profile import Profile
from qsync_fx.report import graph_tab, model_tabs, plan_tabs, profile_tabs
from qsync_fx.serialization.atomic_files import write_text
from qsync_fx.timeline.timeline import Timeline

Path = str | os.PathLike[str]

FORMAT: Final = "qsync-report"
VERSION: Final = 1

Reported = (
    Explanation
    | Plan
    | ClusterPlan
    | PlanResult
    | ParetoFront
    | Profile
    | Sensitivity
    | Timeline
    | PlanCoverage
)
"""Values that a report shows."""

_TYPES: Final = Reported.__args__

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy: the page cannot load files from a network or a disk."""


class Report:
    """Report on one or several values, which together fill its tabs.

    Args:
        values: explanation, plans, planning result, front, profiles, sensitivity, timelines,
            coverage; a value of a device class can be given as a mapping from its name.
        title: heading of the page.

    Raises:
        OptionError: there is no value, or a value of another type.
    """

    def __init__(self, *values: object, title: str = "qsync report") -> None:
        self.title = title
        self._values = [pair for value in values for pair in _named(value)]
        if not self._values:
            raise OptionError("a report needs at least one value", do=f"pass {_wanted()}")

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The data of the report, JSON-compatible: only tabs with data are in "tabs"."""
        tabs = Tabs()
        answers = [value for _, value in self._values if isinstance(value, PlanResult)]
        for name, value in self._values:
            match value:
                case PlanResult():
                    plan_tabs.add_result(tabs, value)
                case ParetoFront():
                    plan_tabs.add_front(tabs, value)
                case Profile():
                    profile_tabs.add_profile(tabs, value, name, planned=bool(answers))
                case Sensitivity() if not answers:
                    profile_tabs.add_sensitivity(tabs, value, name)
                case Timeline():
                    plan_tabs.add_timeline(tabs, value, name or "this timeline")
                case Explanation():
                    graph_tab.add_explanation(tabs, value)
                case Plan() | ClusterPlan():
                    model_tabs.add_plan(tabs, value, name, self._explanation)
                case PlanCoverage():
                    model_tabs.add_coverage(tabs, value)
        return {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "torch": torch.__version__,
            "formats": _formats(tabs),
            "tabs": {name: tabs[name] for name in ORDER if name in tabs},
        }

    @property
    def _explanation(self) -> Explanation | None:
        values = (value for _, value in self._values)
        return next((value for value in values if isinstance(value, Explanation)), None)

    def html(self) -> str:
        """Return the page: HTML, style, program and document in one text."""
        text = json.dumps(_finite(self.document), allow_nan=False, separators=(",", ":"))
        # A "<" in a name of the model must not end the script element.
        data = text.replace("<", "\\u003c").replace("\u2028", "\\u2028")
        program = _bundled("bundle.js").replace("</script", "<\\/script")
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self.title)}</title>\n"
            f"<style>\n{_bundled('bundle.css')}</style>\n</head>\n<body>\n"
            '<noscript>This report needs JavaScript.</noscript>\n<div id="report"></div>\n'
            f'<script type="application/json" id="{FORMAT}">{data}</script>\n'
            f"<script>\n{program}</script>\n</body>\n</html>\n"
        )

    def save(self, path: Path) -> pathlib.Path:
        """Write the page atomically and return its path; raise `QSyncError` on failure."""
        result = pathlib.Path(path)
        write_text(result, self.html())
        return result

    def notebook(self) -> str:
        """Return the page in a frame, for the output of a notebook's cell."""
        page = html.escape(self.html(), quote=True)
        style = "width:100%;height:640px;border:1px solid #8884"
        return (
            f'<iframe srcdoc="{page}" style="{style}" title="{html.escape(self.title)}"></iframe>'
        )

    def _repr_html_(self) -> str:
        return self.notebook()


class Tabs(dict[str, Any]):
    """Content of the tabs by name; the modules of the tabs add to it."""

    def summary(self) -> dict[str, Any]:
        """Return the summary tab, which several values share."""
        result: dict[str, Any] = self.setdefault(
            "summary", {"facts": [], "sentences": [], "devices": [], "details": []}
        )
        return result


ORDER: Final = (
    "summary",
    "graph",
    "plan",
    "timeline",
    "tradeoff",
    "trust",
    "sensitivity",
    "memory",
)
"""Tabs in the order of the page."""


def save_report(path: Path, *values: object, title: str = "qsync report") -> pathlib.Path:
    """Write one HTML file about several values; it needs no network.

    Args:
        path: file to write, atomically.
        values: see `Report`.
        title: heading of the page.

    Returns:
        The path of the file.

    Raises:
        OptionError: there is no value, or a value of another type.
        QSyncError: the file cannot be written.
    """
    return Report(*values, title=title).save(path)


def _named(value: object) -> list[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else [("", value)]
    result = []
    for name, item in pairs:
        if not isinstance(item, _TYPES):
            message = f"a value of type {type(item).__name__} has no report"
            raise OptionError(message, do=f"pass {_wanted()}")
        result.append((str(name), item))
    return result


def _wanted() -> str:
    return f"a {', '.join(kind.__name__ for kind in _TYPES)}"


def _formats(tabs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the formats of all tabs, widest first; the index in the table fixes the colour."""
    text = json.dumps(_finite(tabs))
    used = [fmt for fmt in FORMATS.values() if f'"{fmt.name}"' in text]
    order = {fmt.name: index for index, fmt in enumerate(FORMATS.values())}
    used.sort(key=lambda fmt: (-fmt.bits, order[fmt.name]))
    return [{"name": fmt.name, "bits": fmt.bits, "colour": order[fmt.name]} for fmt in used]


def _finite(value: Any) -> Any:
    """Return JSON data with shorter numbers, and null for infinity and NaN."""
    match value:
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case str():
            return value
        case Sequence():
            return [_finite(item) for item in value]
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


@functools.cache
def _bundled(name: str) -> str:
    return (pathlib.Path(__file__).parent / name).read_text(encoding="utf-8")
