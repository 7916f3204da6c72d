"""Headless Chromium: pages after their program has run, and console messages."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def rendered(
    page: Path, fragment: str = "", arguments: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the HTML of a page after its program has run, and the lines of its console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", "--enable-logging=stderr", "--v=0", *arguments]
    command += [f"--user-data-dir={page.parent / 'chromium'}", f"{page.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, messages


def with_script(page: Path, script: str) -> Path:
    """Return a copy of a page that runs a script after its own program.

    The text that the script returns becomes the content of an element with the id "result".
    """
    element = (
        "<script>setTimeout(() => { const text = (() => {"
        + script
        + "})(); const result = document.createElement('pre'); result.id = 'result'; "
        "result.textContent = text; document.body.append(result); }, 200);</script>"
    )
    result = page.with_name(f"{page.stem}_scripted.html")
    result.write_text(page.read_text().replace("</body>", f"{element}\n</body>"))
    return result


def result_of(dom: str) -> str:
    """Return the text that the script of `with_script` has returned."""
    match = re.search(r'<pre id="result">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match is not None, "the script has not finished"
    return match[1]
