"""Devices: format support of real devices, and a catalog with cost models of absent ones.

Names are imported on first use (PEP 562), so the catalog can be listed without importing torch.
"""

from qsync_fx.lazy_names import declared, importer

_NAMES = declared(__file__)
__getattr__ = importer(__name__, _NAMES)
__all__ = list(_NAMES)
