"""Configuration of the documentation site; `make docs` builds it into build/docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "qsync_fx"
author = "the qsync_fx developers"
copyright = "2026, the qsync_fx developers"
release = version = "0.1.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []
html_theme = "furo"
html_title = "qsync_fx"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": "",
    "navigation_with_keys": True,
}
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough", "misc.highlighting_failure"]
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: object) -> None:
    """Turn links to source files, which have no page, into code references."""
    app.connect("source-read", _plain_source_links)  # type: ignore[attr-defined]


def _plain_source_links(_app: object, _name: str, content: list[str]) -> None:
    """Replace `[label](../path/file.py)` by label and path: the site has no source pages."""
    text = content[0]
    text = re.sub(r"\[([^\]]+)\]\(\.\./README\.md(#[\w-]+)?\)", r"\1", text)
    text = re.sub(
        r"(\(?)\[([^\]]+)\]\(\.\./(?!benchmarks/results/)"
        r"((?:qsync_fx|passes|backend|cpp|benchmarks|tests|examples)[^)#]*)\)",
        _label_and_path,
        text,
    )
    content[0] = text


def _label_and_path(link: re.Match[str]) -> str:
    opening, label, path = link.groups()
    if path.endswith(label.strip("`/")):
        return f"{opening}`{path}`"
    return f"({label}: `{path}`" if opening else f"{label} (`{path}`)"
