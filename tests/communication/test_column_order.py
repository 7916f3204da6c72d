"""Copies of gradients to coding order and back, compared with torch's copies."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from qsync_fx.communication import bucket
from qsync_fx.communication.codecs import codec_named

EXTENTS = st.one_of(st.integers(1, 9), st.integers(1, 130))


@given(EXTENTS, EXTENTS, st.integers(0, 3), st.booleans())
def test_columns_of_matrices(rows: int, columns: int, ahead: int, room: bool) -> None:
    """Row-major and transposed matrices with a NaN, at any address."""
    buffer = torch.randn(ahead + rows * columns)
    buffer[ahead] = float("nan")
    for gradient in (buffer[ahead:].view(rows, columns), buffer[ahead:].view(columns, rows).t()):
        piece = bucket.piece("weight", 0, gradient.shape, codec_named("1bit"), 2)
        into = torch.full((piece.size,), 7.0) if room else None
        result = bucket.ordered(piece, gradient, into)
        assert result is not None and (into is None or result is into)
        assert torch.equal(
            result.view(torch.int32), gradient.t().contiguous().view(-1).view(torch.int32)
        )
        back = torch.zeros_like(gradient)
        bucket.put_back(piece, back, result)
        assert torch.equal(back.view(torch.int32), gradient.view(torch.int32))


def test_contiguous_columns_are_not_copied() -> None:
    piece = bucket.piece("weight", 0, (8, 4, 3, 3), codec_named("1bit"), 2)
    assert bucket.ordered(piece, torch.randn(8, 4, 3, 3)) is None
    gradient = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    result = bucket.ordered(piece, gradient)
    assert result is not None and torch.equal(result.view(8, 4, 3, 3), gradient)
