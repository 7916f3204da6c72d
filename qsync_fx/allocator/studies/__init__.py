"""What to ask of an answer: how others would have chosen, why an operator has its format, what if it had another, what more time would buy.

Invariant: every number is the judge's.
"""

from qsync_fx.allocator.studies.comparison import Compared, compare
from qsync_fx.allocator.studies.one_step import OneStep, one_step
from qsync_fx.allocator.studies.pareto import Front, pareto
from qsync_fx.allocator.studies.selecting import selected
from qsync_fx.allocator.studies.what_if import what_if

__all__ = ["Compared", "Front", "OneStep", "compare", "one_step", "pareto", "selected", "what_if"]
