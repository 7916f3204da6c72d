"""Documentation site: it builds without warnings, and its menu contains all pages."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.support import benchmarks_page
from benchmarks.support.benchmarks_page import Figure
from tests.support import tiers

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"


@tiers.ALL
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    docs, site = ROOT / "docs", tmp_path / "site"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    assert [page for page in pages if not (site / f"{page}.html").exists()] == []
    index = (site / "index.html").read_text()
    assert [page for page in pages - {"index"} if f'href="{page}.html"' not in index] == []


def test_charts_are_drawn_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    plots.main()
    for chart in plots.CHARTS:
        path = Path(f"{chart.__name__}.svg")
        drawn, shown = ((folder / path).read_text() for folder in (tmp_path, IMAGES))
        assert texts(drawn) == texts(shown), f"{path} is out of date: make docs-figures"


def test_page_of_benchmarks_is_current_and_has_every_result() -> None:
    shown = benchmarks_page.PAGE.read_text()
    assert shown == benchmarks_page.page(), "benchmarks.md is out of date: make docs-figures"
    names = {path.stem for path in benchmarks_page.RESULTS.glob("*.json")}
    figures = itertools.chain.from_iterable(benchmarks_page.SUBJECTS.values())
    assert names == set(benchmarks_page.results(figures))
    assert len(shown.splitlines()) <= 300


def test_page_of_benchmarks_counts_cases_that_miss_their_goal() -> None:
    rows = [{"case": "a", "met": True}, {"case": "b", "met": False}]
    values = [(2.0, rows[0]), (0.5, rows[1])]
    for figure, goal, missed in (
        (Figure("", "", "", least=1), "≥\u00a01", "1 of 2, worst: b"),
        (Figure("", "", "", most=1), "≤\u00a01", "1 of 2, worst: a"),
        (Figure("", "", "", least=0.5), "≥\u00a00.50", "none"),
        (Figure("", "", "", met="met"), "of each case", "1 of 2, such as b"),
    ):
        assert benchmarks_page.goal(figure, values) == (goal, missed)


def texts(svg: str) -> list[str]:
    """Return the texts of an SVG image; other parts depend on the version of matplotlib."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)
