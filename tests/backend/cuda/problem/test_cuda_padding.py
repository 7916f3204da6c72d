"""Layout, padding and copies of operands for a kernel, and the profit of padding, from sizes
alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, padding
from qsync_fx.backend.cuda.problem.problem import leading, major
from tests.support.cuda.large_products import BF16, INT8


@pytest.mark.parametrize(
    ("shape", "stride", "row", "column"),
    [
        ((3, 5), (5, 1), 5, None),
        ((3, 5), (8, 1), 8, None),
        ((3, 5), (1, 3), None, 3),
        ((3, 5), (10, 2), None, None),
        ((3, 5), (0, 1), None, None),  # a broadcast: one row in memory
        ((1, 5), (77, 1), 5, 1),  # one row has both layouts, with any stride
        ((3, 1), (1, 77), 1, 3),
        ((3, 1), (4, 1), 4, None),
    ],
)
def test_leading_dimensions(
    shape: tuple[int, int], stride: tuple[int, int], row: int | None, column: int | None
) -> None:
    t = torch.empty_strided(shape, stride, device="meta")
    assert (leading(t, "row"), leading(t, "column")) == (row, column)
    assert major(t) == ("row" if row else "column" if column else None)


@given(st.data())
def test_filled_problems_are_aligned_and_no_larger_than_needed(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 5000)) for _ in range(3)]
    formats = data.draw(
        st.sampled_from([("int8", "int8"), ("fp16", "fp16"), ("fp8_e5m2", "fp8"), ("tf32", "tf32")])
    )
    majors = [data.draw(st.sampled_from(["row", "column"])) for _ in range(2)]
    problem = GemmProblem(*sizes, *formats, data.draw(st.sampled_from(["fp32", "bf16"])), *majors)  # type: ignore[arg-type]
    padded = padding.filled(problem)
    assert isinstance(padded, GemmProblem) and padding.filled(padded) == padded
    assert all(0 <= getattr(padded, name) - getattr(problem, name) < 16 for name in ("m", "n", "k"))
    for copy, dimensions in zip(
        padding.copied(problem, padded), [("m", "k"), ("k", "n")], strict=True
    ):
        assert copy == any(getattr(padded, name) != getattr(problem, name) for name in dimensions)
    # Copies never reduce the number of bytes moved.
    assert padding.moved(problem, padded) >= padding.moved(problem, problem)


def test_padding_is_profitable_by_bytes() -> None:
    """Check that padding pays for odd INT8 sizes, since cuBLAS requires multiples of 8, but not for
    odd BF16 sizes or tiny sizes.
    """
    assert padding.pays(INT8, INT8)
    odd = replace(INT8, k=4095)
    assert padding.pays(odd, padding.filled(odd))
    odd = replace(BF16, k=4095, n=4095)
    assert not padding.pays(odd, padding.filled(odd))
    thin = replace(INT8, k=3)
    assert not padding.pays(thin, padding.filled(thin))
    stem = ConvProblem(
        "fprop", 8, 224, 224, 3, 64, 7, 7, (3, 3), (2, 2), (1, 1), "int8", "int8", "bf16"
    )
    assert not padding.pays(stem, padding.filled(stem))
