"""Report: one offline HTML file about a plan, a model, a profile or a step.

`Report` collects the data of its values in one JSON document (`document.py`), by one module per
group of tabs, and puts it into a page with the program of the browser (`bundle.js`, `bundle.css`).
`make report-bundle` builds both files from web/.
"""

from qsync_fx.report.document import Report, save_report

__all__ = ["Report", "save_report"]
