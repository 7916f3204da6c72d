"""Symbolic sizes as text: round trips, and rejection of any other text."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sympy
from hypothesis import given, settings, strategies as st

from qsync_fx.predictor.model.symbolic_sizes import FUNCTIONS, canonical, read, symbol, written
from qsync_fx.serialization import Malformed

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")
# torch's size functions return no number for fractions.
leaves: st.SearchStrategy[Any] = st.one_of(
    st.integers(-9, 10**6), st.sampled_from([BATCH, SEQUENCE])
)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a: a**2, inner),
        st.builds(
            lambda a, b: FUNCTIONS["FloorDiv"](sympy.sympify(a) * BATCH, sympy.Integer(b)),
            inner,
            st.integers(2, 9),
        ),
        st.builds(lambda a: FUNCTIONS["Max"](1, sympy.sympify(a) + SEQUENCE), inner),
    )


@settings(deadline=None)
@given(st.recursive(leaves, combined, max_leaves=6))
def test_sizes_are_saved_and_loaded(size: Any) -> None:
    result = canonical(size)
    assert read(written(result)) == result
    values = dict.fromkeys((BATCH, SEQUENCE), 12)
    assert sympy.sympify(result).subs(values).equals(sympy.sympify(size).subs(values))


def test_every_symbolic_function_of_torch_is_supported() -> None:
    """The functions are defined in torch.utils._sympy.functions, which is private."""
    assert set(FUNCTIONS) == {
        "FloorDiv",
        "CleanDiv",
        "ModularIndexing",
        "Mod",
        "PythonMod",
        "CeilDiv",
        "Max",
        "Min",
    }
    for name in ("FloorDiv", "Mod", "Max"):
        size = FUNCTIONS[name](BATCH, 2)
        assert canonical(size).subs(BATCH, 7) == {"FloorDiv": 3, "Mod": 1, "Max": 7}[name]


@pytest.mark.parametrize(
    "text",
    [
        "", "1+", "+1", "__import__('os')", "exec(1)", "9**9**9", "((9**64)**64)", "batch**65",
        "(batch**8)**9", "1/0", "a.b", "[1]",
        "FloorDiv(batch, 0)", "FloorDiv(batch)", "Mod(1, 0)", "(" * 100 + "b", "b b", "b**-1",
        "b**c", "1.5", "1e9", "a" * 5000, "--1",
        "9" * 41, "lambda: 0", "b;b", "\u0661", "b*" * 70 + "b",
    ],
)  # fmt: skip
def test_other_expressions_are_rejected(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(Malformed):
        read(text)
    assert time.monotonic() - start < 10, "a large power is rejected quickly"


@given(st.text(alphabet="0123456789+-*/() ,abFloorDivMod_", max_size=40))
def test_reading_ends_in_a_size_or_an_error(text: str) -> None:
    try:
        size = read(text)
    except Malformed:
        return
    assert isinstance(size, int) or size.is_number or size.free_symbols
