"""What the backend does to a model, and why: `explanation`, made by `explaining`; the same under another plan: `replan`; what of it runs:
`applied_plan`.
"""

from __future__ import annotations

from qsync_fx.diagnostics.explain_model import explain
from qsync_fx.diagnostics.explanation import Explanation, line_of

__all__ = ["Explanation", "explain", "line_of"]
