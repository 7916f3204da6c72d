"""The documentation site builds without warnings: no broken link, no page outside the menu."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plots
from tests.support import tiers

ROOT = Path(__file__).resolve().parent.parent


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
    for chart in ("speed", "accuracy"):
        drawn = (tmp_path / f"{chart}.svg").read_text()
        assert texts(drawn) == texts((ROOT / "docs" / "images" / f"{chart}.svg").read_text())


def texts(svg: str) -> list[str]:
    """Return the texts of a picture; other parts depend on the version of matplotlib."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)
