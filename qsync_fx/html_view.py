"""HTML view of values: the methods `save_html` and `_repr_html_`, without a renderer.

Values inherit from `HtmlView`. The package `qsync_fx`, which knows all layers, registers the
renderer of qsync_fx/report, so that no value imports what shows it.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Protocol

Path = str | os.PathLike[str]


class Page(Protocol):
    """Rendered report of a value."""

    def save(self, path: Path) -> pathlib.Path:
        """Write one HTML file, and return its path."""

    def notebook(self) -> str:
        """Return the HTML of an output cell of a notebook."""


Renderer = Callable[[object], Page]

_renderers: list[Renderer] = []


def register(renderer: Renderer) -> None:
    """Set the function that renders values."""
    _renderers[:] = [renderer]


class HtmlView:
    """Value that has a report in HTML."""

    def save_html(self, path: Path) -> pathlib.Path:
        """Write the report of this value: one HTML file that needs no network.

        Args:
            path: file to write, atomically.

        Returns:
            The path of the file.

        Raises:
            QSyncError: the file cannot be written.
        """
        return _renderers[0](self).save(path)

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return _renderers[0](self).notebook()
