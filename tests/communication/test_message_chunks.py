"""Chunks of messages: each value once, in order, cut at unit boundaries; messages of outcomes."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, strategies as st

from qsync_fx.communication.bucket import piece
from qsync_fx.communication.codecs import Draw, codec_named
from qsync_fx.communication.message_header import HEADER
from qsync_fx.communication.point_to_point import chunks_of
from qsync_fx.communication.step_outcome import StepOutcome

CODECS = st.sampled_from(["fp32", "fp16", "qsgd2", "qsgd8", "1bit", "1bit*", "aqgb16"])
SHAPES = st.lists(
    st.tuples(CODECS, st.lists(st.integers(0, 60), min_size=1, max_size=3)), min_size=0, max_size=5
)


@given(SHAPES, st.integers(1, 3), st.data(), st.integers(1, 2000))
def test_a_message_is_cut_into_all_of_it(
    shapes: list[tuple[str, list[int]]], ranks: int, data: st.DataObject, most: int
) -> None:
    pieces = [
        piece(str(index), index, shape, codec_named(name), ranks)
        for index, (name, shape) in enumerate(shapes)
    ]
    owner = data.draw(st.integers(0, ranks - 1))
    parts = [item.part(owner) for item in pieces]
    chunks = chunks_of(pieces, parts, most)
    edges = [0, *(item.wire.stop for item in chunks)]
    assert [(item.wire.start, item.wire.stop) for item in chunks] == list(itertools.pairwise(edges))
    assert edges[-1] == HEADER + sum(
        item.codec.nbytes(part.stop - part.start) for item, part in zip(pieces, parts, strict=True)
    )
    assert all(item.wire.stop > item.wire.start for item in chunks)
    for piece_index, (item, part) in enumerate(zip(pieces, parts, strict=True)):
        runs = [run for chunk in chunks for run in chunk.runs if run.place == piece_index]
        assert [
            value for run in runs for value in range(run.values.start, run.values.stop)
        ] == list(range(part.stop - part.start))
        assert all(run.values.start % item.codec.unit == 0 for run in runs)
    for chunk in chunks:
        sizes = [run.values.stop - run.values.start for run in chunk.runs]
        units = [pieces[run.place].codec.unit for run in chunk.runs]
        assert sum(sizes) <= max([most, *units])


@given(CODECS, st.integers(1, 3000), st.integers(1, 700), st.integers(0, 2**31))
def test_values_become_the_same_in_however_many_chunks_of(
    name: str, n: int, most: int, seed: int
) -> None:
    parameter = piece("w", 0, [n], codec_named(name), 1)
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    results = []
    for limit in (most, n):
        residual, decoded = torch.zeros(n) if parameter.codec.residual else None, torch.empty(n)
        for run in (
            run for chunk in chunks_of([parameter], [slice(0, n)], limit) for run in chunk.runs
        ):
            wire = torch.empty(run.wire.stop - run.wire.start, dtype=torch.uint8)
            remainder = None if residual is None else residual[run.values]
            parameter.codec.encode(
                values[run.values], wire, Draw(seed, 3, run.values.start), remainder
            )
            parameter.codec.decode(wire, decoded[run.values])
        results.append((decoded, residual))
    (first, remainder), (second, other_remainder) = results
    assert torch.equal(first, second)
    assert remainder is other_remainder is None or torch.equal(remainder, other_remainder)


@given(st.lists(st.text(min_size=1).filter(lambda text: not text.endswith("\0"))), st.booleans())
def test_an_outcome_is_read_as_it_was_sent_with_any_characters_in_a_fault(
    faults: list[str], finite: bool
) -> None:
    for repeats in (1, 400):
        sent = StepOutcome([fault * repeats for fault in faults], 2**32 - 1, finite)
        received = StepOutcome.unpacked(sent.packed())
        assert (received.digest, received.finite) == (2**32 - 1, finite)
        assert len(received.faults) == min(1, len(faults))
        for fault in received.faults:
            assert sent.faults[0].startswith(fault)
            assert len(fault.encode()) >= min(len(sent.faults[0].encode()), 500)


def test_bytes_that_are_no_outcome_are_a_fault() -> None:
    message = StepOutcome().packed()
    message[0] ^= 1
    assert "cannot be read" in StepOutcome.unpacked(message).faults[0]
