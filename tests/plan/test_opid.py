"""Operator ids: their text form, which is unique per operator."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given, strategies as st

from qsync_fx.errors import PlanError
from qsync_fx.plan.operator_id import OpId
from tests.support.planning.drawn_ids import op_ids


@pytest.mark.parametrize(
    ("op_id", "text"),
    [
        (
            OpId("bert.encoder.layer.0.output.dense", "linear"),
            "bert.encoder.layer.0.output.dense/linear",
        ),
        (
            OpId("bert.encoder.layer.0.attention.self", "matmul", 1),
            "bert.encoder.layer.0.attention.self/matmul#1",
        ),
        (OpId("", "relu", 0, "layer3.1"), "/relu@layer3.1"),
        (OpId("", "relu", 2, "layer3.1"), "/relu@layer3.1#2"),
        (OpId("", "linear"), "/linear"),
        (OpId("", "linear", 10), "/linear#10"),
        (OpId("heads.a/b", "linear"), "heads.a%2Fb/linear"),
        (OpId("heads.50%", "linear"), "heads.50%25/linear"),
        (OpId("heads.\n\ud800é", "linear"), "heads.%0A%ED%A0%80é/linear"),
        (OpId("heads.{a[0]?}*", "linear"), "heads.%7Ba%5B0%5D%3F%7D%2A/linear"),
    ],
)
def test_text_form(op_id: OpId, text: str) -> None:
    assert str(op_id) == text
    assert OpId.parse(text) == op_id


@given(op_ids)
def test_round_trip(op_id: OpId) -> None:
    text = str(op_id)
    assert text.isprintable()
    assert OpId.parse(text) == op_id
    assert pickle.loads(pickle.dumps(op_id)) == op_id


@given(op_ids, op_ids)
@example(OpId("a/b", "c"), OpId("a", "b/c"))
@example(OpId("", "b@a"), OpId("", "b", 0, "a"))
@example(OpId("", "b", 0, "a#1"), OpId("", "b", 1, "a"))
def test_each_operator_has_a_unique_text(first: OpId, second: OpId) -> None:
    assert (str(first) == str(second)) == (first == second)
    assert (first < second) == (second > first)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "linear",
            "a.b",
            "a/",
            "/",
            "a/b/c",
            "a..b/linear",
            ".a/linear",
            "a./linear",
            "a/linear@b",
        ),
        *(
            "a/linear#",
            "a/linear#0",
            "a/linear#01",
            "a/linear#-1",
            "a/linear#1.5",
            "a/linear#x",
            "a/linear#²",
        ),
        *(
            "a/linear#1#2",
            "a/linear#" + "9" * 5000,
            "/linear@",
            "/linear@a..b",
            "/linear@a@b",
            "/linear#1@a",
        ),
        *(
            "a*/linear",
            "a[0]/linear",
            "a{0}/linear",
            "a?/linear",
            "%41/linear",
            "%2f/linear",
            "%FF/linear",
            "%/linear",
        ),
        *("a/linear\n", "\ta/linear", "a/\ud800", "\ud800"),
    ],
)
def test_malformed_text(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        OpId.parse(text)
    assert caught.value.do
    assert str(caught.value).isprintable() or "\n  do:" in str(caught.value)


@given(st.text(st.sampled_from("ab./#@%012*é\n\ud800"), max_size=12))
def test_parse_accepts_only_the_output_of_str(text: str) -> None:
    try:
        op_id = OpId.parse(text)
    except PlanError:
        return
    assert str(op_id) == text


@pytest.mark.parametrize("text", [None, 3, b"a/linear", ["a/linear"]])
def test_text_of_another_type(text: object) -> None:
    with pytest.raises(PlanError, match="must be a string, not"):
        OpId.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("a", ""), "has no operator name"),
        (("a..b", "linear"), "empty segment"),
        (("", "linear", 0, "."), "empty segment"),
        (("a", "linear", 0, "b"), "has `module` and `after`"),
        (("a", "linear", -1), "must be an integer"),
        (("a", "linear", 10**9), "must be an integer"),
        (("a", "linear", True), "must be an integer"),
        ((None, "linear"), "the module of an operator id must be a string"),
        (("a", "linear", 0, 1), "the after of an operator id must be a string"),
    ],
)
def test_ids_that_no_operator_can_have(fields: tuple[str, str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        OpId(*fields)
