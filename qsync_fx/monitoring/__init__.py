"""Metrics of a training run: `monitor`, and callbacks of trainers. Start with step_monitor.py.

Invariant: a monitor changes no tensor, gradient, random state or compiled code. The callbacks are
imported on first use, because their trainers are optional.
"""

from qsync_fx.lazy_names import declared, importer

_NAMES = declared(__file__)
__getattr__ = importer(__name__, _NAMES)
__all__ = list(_NAMES)
