"""Python files of the project, without the links from qsync_fx to passes and backend."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("qsync_fx", "passes", "backend")
BENCHMARKS = ("benchmarks", "examples")
TESTS = ("tests",)


def python_files(folders: tuple[str, ...]) -> list[Path]:
    """Return the Python files in folders of the repository, sorted by path."""
    links = (("qsync_fx", "passes"), ("qsync_fx", "backend"))
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] not in links
    )
