"""Format table: the formats that a row refers to are rows of the table, also in copies."""

import copy
import dataclasses
import pickle

import pytest

from qsync_fx import Plan, PrecisionError
from qsync_fx.formats import FORMATS, Precision, precisions

REFERENCES = ("carrier", "output", "gradient", "elsewhere")


@pytest.mark.parametrize("row", FORMATS.values(), ids=str)
def test_referenced_formats_have_a_row(row: Precision) -> None:
    for name in REFERENCES:
        other = getattr(row, name)
        assert other is FORMATS[other.name]
    assert row.carrier.plain and row.output.plain and row.elsewhere.plain
    assert row.carrier.carrier is row.carrier


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_of_a_row_is_the_row(copied) -> None:  # type: ignore[no-untyped-def]
    plan = copied(Plan("int8", [("head", "tf32")], {"body/linear": "fp8"}))
    assert plan.default is FORMATS["int8"]
    assert plan == Plan("int8", [("head", "tf32")], {"body/linear": "fp8"})
    for row in FORMATS.values():
        assert copied(row) is row


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_row_that_no_table_has_is_equal_to_its_copy_alone(copied) -> None:  # type: ignore[no-untyped-def]
    int4 = dataclasses.replace(FORMATS["int8"], name="int4", bits=4, max=7.0)
    result = copied(int4)
    assert result == int4 and hash(result) == hash(int4) and result.gradient is FORMATS["bf16"]
    for other in (
        dataclasses.replace(int4, max=6.0),
        dataclasses.replace(int4, gradient=FORMATS["int8"]),
        dataclasses.replace(FORMATS["int8"], gradient=FORMATS["int8"]),
        FORMATS["int8"],
    ):
        assert result != other
    assert dataclasses.replace(FORMATS["int8"], gradient=FORMATS["int8"]) != FORMATS["int8"]


def test_lists_of_formats() -> None:
    assert [fmt.name for fmt in precisions(["int8", "fp32", "int8"])] == ["int8", "fp32"]
    assert [fmt.name for fmt in precisions("FP32")] == ["fp32"]
    with pytest.raises(PrecisionError, match="'fp32,int8' is not a precision"):
        precisions("fp32,int8")
