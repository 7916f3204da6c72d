"""The documentation site builds without warnings: no broken link, no page outside the menu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import tiers

ROOT = Path(__file__).resolve().parent.parent


@tiers.ALL
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    index = (tmp_path / "site" / "index.html").read_text()
    assert all(f'href="{page}.html"' in index for page in pages - {"index"})
