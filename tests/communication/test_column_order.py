"""Values of gradients come into the order that they are coded in, and back, as torch's own copies
have it.
"""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from qsync_fx.communication import bucket
from qsync_fx.communication.codecs import codec_named

EXTENTS = st.one_of(st.integers(1, 9), st.integers(1, 130))


@given(EXTENTS, EXTENTS, st.integers(0, 3), st.booleans())
def test_columns_of_matrices(rows: int, columns: int, ahead: int, room: bool) -> None:
    """At any address, with infinities and NaN, of matrices that lie as they are shaped and of
    others.
    """
    buffer = torch.randn(ahead + rows * columns)
    buffer[ahead] = float("nan")
    for gradient in (buffer[ahead:].view(rows, columns), buffer[ahead:].view(columns, rows).t()):
        piece = bucket.piece("weight", 0, gradient.shape, codec_named("1bit"), 2)
        into = torch.full((piece.size,), 7.0) if room else None
        found = bucket.ordered(piece, gradient, into)
        assert found is not None and (into is None or found is into)
        assert torch.equal(
            found.view(torch.int32), gradient.t().contiguous().view(-1).view(torch.int32)
        )
        back = torch.zeros_like(gradient)
        bucket.put_back(piece, back, found)
        assert torch.equal(back.view(torch.int32), gradient.view(torch.int32))


def test_contiguous_columns_are_not_copied() -> None:
    piece = bucket.piece("weight", 0, (8, 4, 3, 3), codec_named("1bit"), 2)
    assert bucket.ordered(piece, torch.randn(8, 4, 3, 3)) is None
    laid = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    found = bucket.ordered(piece, laid)
    assert found is not None and torch.equal(found.view(8, 4, 3, 3), laid)
