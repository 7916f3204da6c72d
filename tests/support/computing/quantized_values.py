"""Comparison of tensor bits, and all values of a format, for the tests of quantizers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qsync_fx.formats import FORMATS, Precision

SCALED = [row.name for row in FORMATS.values() if row.scaled]
GRIDDED = [row.name for row in FORMATS.values() if not row.scaled and not row.plain]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equal bits, dtypes, shapes and strides; all NaN are equal."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    if actual.dtype.itemsize > 1:
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0)
    actual_bits, expected_bits = (
        t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for t in (actual, expected)
    )
    assert torch.equal(actual_bits, expected_bits)


def grid_of(row: Precision) -> np.ndarray:
    """Return all values of an 8-bit format in ascending order."""
    if row.kind == "integer":
        return np.arange(-row.max, row.max + 1)
    values = torch.arange(256, dtype=torch.uint8).view(row.dtype).double()
    return np.unique(values[values.isfinite()].numpy())
