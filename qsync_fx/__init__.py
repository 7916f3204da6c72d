"""Data-parallel training over unequal GPUs, with the fewest operators in low precision.

`torch.compile(model, backend="qsync")` compiles a model, `explain` shows the decisions for each
operator, `plan_coverage` shows which parts of a plan run, and `graph_pass` adds a custom pass.
`measure` and `find_plan` profile a model and choose the format of each operator.

Invariant: importing this package imports only torch; each name is imported on first use (PEP 562).
"""

from __future__ import annotations

from qsync_fx.lazy_names import declared, importer

__version__ = "0.1.0"

_NAMES = declared(__file__)
__getattr__ = importer(__name__, _NAMES)
__all__ = ["__version__", *sorted(name for name, (home, _) in _NAMES.items() if home != __name__)]


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
