"""Plan text from any source: text or bytes are a plan or a PlanError that names the position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from qsync_fx.errors import PlanError
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import PLAN
from tests.support.planning.plan_samples import op_ids, patterns, plans, precisions

HEAD = '{"format": "qsync-plan", "version": 1'


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("", "the plan is empty", "line 1, column 1"),
        (" \n", "the plan is empty", "line 2, column 1"),
        ("\0\0\0", "not valid JSON", "line 1, column 1"),
        ("{", "is truncated", "line 1, column 2"),
        (HEAD, "is truncated", "line 1"),
        (HEAD + ', "operators": {"a/b": "in', "is truncated", "line 1, column 61"),
        (HEAD + "} trailing", "not valid JSON", "line 1, column 40"),
        ("{'format': 1}", "not valid JSON", "line 1, column 2"),
        ("[]", "the plan must be a JSON object, not a list", None),
        ("NaN", "not the number nan", None),
        ("1" * 10_000, "is not valid JSON: Exceeds the limit", None),
        ("[" * 100_000, "nested too deeply", None),
        ('{"a":' * 100_000, "nested too deeply", None),
        (HEAD + ', "patterns": ' + "[" * 500 + "]" * 500 + "}", "not a list of 1", "patterns[0]"),
        ("{}", "is not marked as a plan", "format"),
        ('{"format": "other", "version": 1}', "is not marked as a plan", "format"),
        ('{"format": "qsync-plan"}', "version is missing", "version"),
        (
            '{"format": "qsync-plan", "version": 2, "new": 1}',
            "has version 2, but this qsync_fx reads version 1",
            "version",
        ),
        ('{"format": "qsync-plan", "version": 0}', "version is the number 0", "version"),
        ('{"format": "qsync-plan", "version": -1}', "version is the number -1", "version"),
        ('{"format": "qsync-plan", "version": 1.0}', "version is the number 1.0", "version"),
        ('{"format": "qsync-plan", "version": true}', "version is true", "version"),
        ('{"format": "qsync-plan", "version": "1"}', "version is text", "version"),
        (
            '{"format": "qsync-plan", "version": ' + "9" * 10**5 + "}",
            "is not valid JSON: Exceeds the limit",
            None,
        ),
        ('{"format": "qsync-plan", "version": 1e999}', "version is the number inf", "version"),
        (HEAD + ', "operatos": {}}', "unknown field 'operatos'", None),
        (HEAD + ', "default": NaN}', "not the number nan", "default"),
        (HEAD + ', "default": 1e999}', "not the number inf", "default"),
        (HEAD + ', "default": "int9"}', "'int9' is not a precision", "default"),
        (
            HEAD + ', "default": "int8", "default": "int8"}',
            "the key 'default' occurs twice",
            None,
        ),
        (
            HEAD + ', "operators": {"a/b": "int8", "a/b": "fp32"}}',
            "the key 'a/b' occurs twice",
            "operators",
        ),
        (HEAD + ', "notes": {"a": "", "a": ""}}', "the key 'a' occurs twice", "notes"),
        (HEAD + ', "operators": {"a/b": 8}}', "a string, not the number 8", 'operators["a/b"]'),
        (HEAD + ', "operators": {"a/b": null}}', "a string, not null", 'operators["a/b"]'),
        (HEAD + ', "operators": {"a/b": {"x": 1}}}', "a string, not an object", 'operators["a/b"]'),
        (
            HEAD + ', "operators": {"\\u001b[2J": "int8"}}',
            "'\\x1b[2J' is not an operator id",
            'operators["\\u001b[2J"]',
        ),
        (HEAD + ', "operators": null}', "operators must be a mapping, not null", "operators"),
        (HEAD + ', "patterns": null}', "patterns must be a list, not null", "patterns"),
        (
            HEAD + ', "patterns": [["a", "int8"], ["b", Infinity]]}',
            "a string, not the number inf",
            "patterns[1]",
        ),
        (HEAD + ', "patterns": [["a", "b", "c"]]}', "not a list of 3", "patterns[0]"),
        (HEAD + ', "patterns": [{"a": "b"}]}', "not an object", "patterns[0]"),
        (HEAD + ', "notes": {"seed": 1}}', "not to the number 1", 'notes["seed"]'),
        (" " * (PLAN.largest + 1), "larger than", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_text(text: str, message: str, where: str | None, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    error = caught.value
    assert message in error.what
    assert error.where == where or (where and error.where and error.where.startswith(where))
    assert error.do
    assert len(str(error)) < 1000
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.where == f"'{path}'" + (f", {error.where}" if error.where else "")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for data in (b'{"format": "\xff"}', Plan.uniform("int8").to_json().encode("utf-16")):
        path.write_bytes(data)
        with pytest.raises(PlanError, match="not valid UTF-8"):
            Plan.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + Plan.uniform("int8").to_json().encode())
    assert Plan.load(path) == Plan.uniform("int8")


@pytest.mark.parametrize("value", [None, 3, {"format": "qsync-plan"}])
def test_text_of_another_type(value: object) -> None:
    with pytest.raises(PlanError, match="decoded from text"):
        Plan.from_json(value)  # type: ignore[arg-type]


def raises_nothing_else(text: str | bytes) -> None:
    try:
        plan = Plan.from_json(text)
    except PlanError as error:
        message = str(error)
    else:
        message = str(plan)
        assert Plan.from_json(plan.to_json()) == plan
    assert len(message.encode()) < 2000


@settings(max_examples=300)
@given(st.one_of(st.binary(), st.text()))
@example(b"\xef\xbb\xbf")
@example("\ufeff{}")
def test_arbitrary_text(text: str | bytes) -> None:
    raises_nothing_else(text)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), precisions, patterns
)
values = st.recursive(
    scalars,
    lambda v: st.one_of(
        st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3)
    ),
)
almost_plans = st.fixed_dictionaries(
    {"format": st.just("qsync-plan"), "version": st.just(1)},
    optional={
        "default": st.one_of(precisions, values),
        "patterns": st.one_of(
            st.lists(st.one_of(st.lists(scalars, min_size=2, max_size=2), values), max_size=3),
            values,
        ),
        "operators": st.one_of(
            st.dictionaries(st.one_of(op_ids.map(str), st.text()), scalars, max_size=3), values
        ),
        "notes": st.one_of(st.dictionaries(st.text(), st.text(), max_size=3), values),
        "others": values,
    },
)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(values, almost_plans))
@example({"format": "qsync-plan", "version": 1, "default": {}, "patterns": None})
def test_arbitrary_json(value: object) -> None:
    raises_nothing_else(json.dumps(value))


@given(plans, st.data())
def test_damaged_plans(plan: Plan, data: st.DataObject) -> None:
    text = plan.to_json().encode()
    cut = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(PlanError):
        Plan.from_json(text[:cut])
    raises_nothing_else(text[:cut] + data.draw(st.binary(min_size=1, max_size=3)) + text[cut + 1 :])
