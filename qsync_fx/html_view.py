"""HTML view of values: the methods `save_html` and `_repr_html_`."""

from __future__ import annotations

import os
import pathlib


class HtmlView:
    """Value that has a report in HTML."""

    def save_html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the report of this value: one HTML file that needs no network.

        Args:
            path: file to write, atomically.

        Returns:
            The path of the file.

        Raises:
            QSyncError: the file cannot be written.
        """
        import qsync_fx

        return qsync_fx.Report(self).save(path)

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        import qsync_fx

        return qsync_fx.Report(self).notebook()
