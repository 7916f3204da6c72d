"""Plans: the precision of each operator, the text form, and checks against a model."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given, strategies as st

from qsync_fx.errors import PlanError
from qsync_fx.formats import FORMATS
from qsync_fx.plan import Choice, Plan
from qsync_fx.plan.operator_id import OpId
from tests.support.planning.plan_samples import op_ids, patterns, plans, precisions

QUERY = OpId("encoder.layer.0.attention.self.query", "linear")
DENSE = OpId("encoder.layer.0.output.dense", "linear")
NORM = OpId("encoder.layer.0.output.LayerNorm", "layer_norm")
POOLER = OpId("pooler.dense", "linear")
RELU = OpId("", "relu", 1, "pooler")
MODEL = (QUERY, DENSE, NORM, POOLER, RELU)


def test_uniform() -> None:
    plan = Plan.uniform("int8")
    assert plan.precision_for(DENSE) == Choice(
        FORMATS["int8"], "plan: uniform int8", explicit=False
    )
    assert plan == Plan(default=FORMATS["int8"])
    assert repr(plan) == "Plan.uniform('int8')"


def test_operator_beats_pattern_beats_default() -> None:
    plan = Plan(
        "int8",
        [("encoder", "fp16"), ("encoder.layer.*.output", "bf16")],
        {str(NORM): "fp32", str(RELU): "tf32"},
    )
    assert [plan.precision_for(op_id) for op_id in MODEL] == [
        Choice(FORMATS["fp16"], 'plan: pattern "encoder"'),
        Choice(FORMATS["bf16"], 'plan: pattern "encoder.layer.*.output"'),
        Choice(FORMATS["fp32"], "plan"),
        Choice(FORMATS["int8"], "plan: default int8", explicit=False),
        Choice(FORMATS["tf32"], "plan"),
    ]
    assert Plan(operators={DENSE: "bf16"}).precision_for(NORM) is None


def test_later_pattern_wins() -> None:
    narrow_last = Plan("int8", [("encoder", "fp16"), ("**/linear", "bf16")])
    wide_last = Plan("int8", [("**/linear", "bf16"), ("encoder", "fp16")])
    assert narrow_last.precision_for(DENSE) == Choice(FORMATS["bf16"], 'plan: pattern "**/linear"')
    assert wide_last.precision_for(DENSE) == Choice(FORMATS["fp16"], 'plan: pattern "encoder"')
    assert narrow_last != wide_last


@given(plans, op_ids, patterns, precisions)
def test_last_matching_rule_wins(plan: Plan, op_id: OpId, pattern: str, precision: str) -> None:
    by_pattern = plan.with_precision(pattern, precision)
    for candidate in (op_id, *plan.operators):
        if candidate.matches(pattern):
            assert by_pattern.precision_for(candidate) == Choice(
                FORMATS[precision], f'plan: pattern "{pattern}"'
            )
        else:
            assert _chosen(by_pattern, candidate) == _chosen(plan, candidate)
    by_id = by_pattern.with_precision(op_id, precision)
    assert by_id.precision_for(op_id) == Choice(FORMATS[precision], "plan")
    assert by_id.notes == plan.notes
    assert by_id.with_precision(op_id, precision) == by_id


def _chosen(plan: Plan, op_id: OpId) -> str | None:
    choice = plan.precision_for(op_id)
    return choice.precision.name if choice else None


@given(plans)
def test_round_trip(plan: Plan) -> None:
    text = plan.to_json()
    for same in (
        Plan.from_json(text),
        Plan.from_json(text.encode()),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert same == plan
        assert hash(same) == hash(plan)
        assert same.notes == plan.notes
        assert same.to_json() == text
    assert json.loads(text)["version"] == 1
    assert all(line.isprintable() for line in f"{plan}\n{plan!r}\n{text}".splitlines())


@given(plans, st.randoms())
def test_equal_by_content(plan: Plan, random: object) -> None:
    entries = list(plan.operators.items())
    random.shuffle(entries)  # type: ignore[attr-defined]
    shuffled = Plan(plan.default, plan.patterns, dict(entries), {"made by": "another"})
    assert shuffled == plan
    assert hash(shuffled) == hash(plan)
    assert (
        shuffled.to_json()
        == Plan(plan.default, plan.patterns, plan.operators, {"made by": "another"}).to_json()
    )
    for op_id in plan.operators:
        assert Plan(plan.default, plan.patterns, {k: v for k, v in entries if k != op_id}) != plan
    if plan.default:
        assert Plan(None, plan.patterns, plan.operators) != plan


def test_a_plan_never_changes() -> None:
    operators, listed = {DENSE: "bf16"}, [("encoder", "fp16")]
    plan = Plan("int8", listed, operators)
    operators[NORM] = "fp32"
    listed.append(("pooler", "fp32"))
    assert plan == Plan("int8", [("encoder", "fp16")], {DENSE: "bf16"})
    with pytest.raises(TypeError):
        plan.operators[NORM] = FORMATS["fp32"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        plan.default = None  # type: ignore[misc]


def test_plan_is_printed_in_a_readable_form() -> None:
    plan = Plan(
        "int8",
        [("encoder.layer.*.output", "bf16")],
        {QUERY: "bf16", NORM: "fp32", RELU: "fp32"},
        {"by": "\x1b[2J"},
    )
    assert str(plan).splitlines() == [
        "<Plan default='int8' patterns=1 operators=3>",
        "  2                                 fp32",
        "  1                                 bf16",
        '  pattern "encoder.layer.*.output"  bf16',
        "  all others                        int8",
        "  note 'by'                         '\\x1b[2J'",
    ]
    assert plan.to_json() == (
        '{\n  "format": "qsync-plan",\n  "version": 1,\n  "default": "int8",\n'
        '  "patterns": [\n    ["encoder.layer.*.output", "bf16"]\n  ],\n'
        '  "operators": {\n    "/relu@pooler#1": "fp32",\n'
        '    "encoder.layer.0.attention.self.query/linear": "bf16",\n'
        '    "encoder.layer.0.output.LayerNorm/layer_norm": "fp32"\n  },\n'
        '  "notes": {\n    "by": "\\u001b[2J"\n  }\n}\n'
    )
    assert str(Plan()) == "Plan()"
    assert str(Plan.uniform("int8")) == "Plan.uniform('int8')\n  all operators  int8"


def test_layers_are_written_in_the_order_of_their_numbers() -> None:
    plan = Plan(operators={OpId(f"layer.{n}", "linear"): "bf16" for n in (10, 2, 1, 0)})
    assert list(json.loads(plan.to_json())["operators"]) == [
        f"layer.{n}/linear" for n in (0, 1, 2, 10)
    ]


@pytest.mark.parametrize(
    ("arguments", "message", "where"),
    [
        ({"default": "int9"}, "'int9' is not a precision", "default"),
        ({"default": 8}, "a precision must be a string", "default"),
        ({"patterns": "a"}, "patterns must be a list, not text", "patterns"),
        ({"patterns": {"a": "int7"}}, "'int7' is not a precision", "patterns[0]"),
        ({"patterns": ["ab"]}, "a pair of pattern and precision, not text", "patterns[0]"),
        (
            {"patterns": [("a", "int8"), ("b",)]},
            "a pair of pattern and precision, not a list of 1",
            "patterns[1]",
        ),
        ({"patterns": [("a..b", "int8")]}, "is not a pattern", "patterns[0]"),
        ({"patterns": [(3, "int8")]}, "a pattern must be a string", "patterns[0]"),
        ({"patterns": [("a", "bf61")]}, "'bf61' is not a precision", "patterns[0]"),
        ({"patterns": [("a", "int8")] * 2001}, "too many patterns: 2001", "patterns"),
        ({"operators": [("a/b", "int8")]}, "operators must be a mapping, not a list", "operators"),
        ({"operators": {"linear": "int8"}}, "not an operator id", 'operators["linear"]'),
        ({"operators": {"a/linear": "int"}}, "'int' is not a precision", 'operators["a/linear"]'),
        ({"operators": {7: "int8"}}, "an operator id must be a string", 'operators["7"]'),
        (
            {"operators": {OpId("a", "b"): "int8", "a/b": "fp32"}},
            "occurs twice",
            'operators["a/b"]',
        ),
        ({"notes": {"seed": 1}}, "a note must map", 'notes["seed"]'),
        ({"notes": "text"}, "notes must be a mapping, not text", "notes"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, object], message: str, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**arguments)  # type: ignore[arg-type]
    assert message in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(where)
    assert caught.value.do


def test_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'bf16'"):
        Plan.uniform("bf61")


# Checks against a model.


def test_check_passes_plans_of_the_model() -> None:
    Plan.uniform("int8").check(MODEL, complete=True)
    Plan(operators=dict.fromkeys(MODEL, "int8")).check(MODEL, complete=True)
    Plan(operators=dict.fromkeys(MODEL, "int8")).check(MODEL[:2], complete=False)
    Plan(patterns=[("encoder", "int8"), ("**/linear", "bf16"), ("/relu", "fp32")]).check(
        MODEL, complete=True
    )
    Plan("int8", [("encoder.layer.*.output", "bf16"), ("nothing", "fp32")], {"x/y": "fp32"}).check(
        MODEL, complete=False
    )


def test_check_lists_missing_and_extra() -> None:
    plan = Plan(operators={f"module.{op_id}": "int8" for op_id in MODEL if op_id.module})
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    error = caught.value
    assert error.what == (
        "the plan has no precision for 5 of the 5 operators and names 4 operators that the model "
        "does not have"
    )
    assert error.where is not None
    assert f"missing from the plan: {QUERY}, {DENSE}" in error.where
    assert (
        "in the plan, not in this model: module.encoder.layer.0.attention.self.query/linear"
        in error.where
    )
    assert error.do is not None
    assert "set a default precision in the plan" in error.do
    assert f"nearest to '{QUERY}' in the plan: module.{QUERY}" in error.do
    with pytest.raises(PlanError, match="in the plan, not in this part of the model"):
        plan.check(MODEL, complete=False)


def test_check_lists_ten_and_counts_all() -> None:
    model = [OpId(f"layer.{n}", "linear") for n in range(37)]
    with pytest.raises(PlanError) as caught:
        Plan().check(model, complete=False)
    assert (
        caught.value.where
        == f"missing from the plan: {', '.join(map(str, model[:10]))}, ... (37 in total)"
    )


def test_check_names_operators_that_the_model_does_not_have() -> None:
    plan = Plan("int8", operators={"pooler.densse/linear": "fp32"})
    plan.check(MODEL, complete=False)
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    assert caught.value.what == "the plan names 1 operator that the model does not have"
    assert caught.value.do is not None
    assert caught.value.do.startswith(
        "use the plan of this model; nearest to 'pooler.densse/linear' in the model: "
        "pooler.dense/linear"
    )


@pytest.mark.parametrize(
    ("pattern", "close"),
    [
        ("encoder.layer.*.outputs", "nearest: encoder.layer.0.output"),
        ("pooler.dens/linear", "nearest: pooler.dense/linear"),
        ("zzz", "remove it"),
    ],
)
def test_check_reports_patterns_without_a_match(pattern: str, close: str) -> None:
    plan = Plan("int8", [("encoder", "bf16"), (pattern, "fp32")])
    plan.check(MODEL, complete=False)
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    assert (
        caught.value.what == f"the pattern {pattern!r} selects none of the 5 adjustable operators"
    )
    assert caught.value.where == "patterns[1] of the plan"
    assert caught.value.do is not None
    assert caught.value.do.startswith(close)


@pytest.mark.parametrize(
    ("pattern", "idle", "close"),
    [
        (
            "encoder.layer.*.{output,outptu}",
            "encoder.layer.*.outptu",
            "nearest: encoder.layer.0.output",
        ),
        ("{pooler,encoder}.{dense,layer,nothing}.**", "{pooler,encoder}.nothing.**", ""),
        ("pooler.dense/{linear, lineer}", "pooler.dense/lineer", "nearest: pooler.dense/linear"),
    ],
)
def test_check_reports_alternatives_without_a_match(pattern: str, idle: str, close: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan("int8", [("encoder", "bf16"), (pattern, "fp32")]).check(MODEL, complete=True)
    assert caught.value.what == f"the pattern {idle!r} selects none of the 5 adjustable operators"
    assert caught.value.where == f"patterns[1] of the plan, {pattern!r}"
    assert caught.value.do is not None
    assert caught.value.do.startswith(close)


def test_not_every_combination_of_alternatives_has_to_match() -> None:
    Plan(
        "int8",
        [
            ("encoder.layer.{0..40}", "bf16"),
            ("{encoder.layer.0,pooler}.{output.dense,dense}", "fp32"),
        ],
    ).check(MODEL, complete=True)


def test_check_of_a_large_stranger_ends() -> None:
    plan = Plan(
        operators={OpId("a" * 150 + f".b{n}", "linear"): "int8" for n in range(20_000)}
        | {"c" * 10**6 + "/d": "int8"}
    )
    with pytest.raises(PlanError) as caught:
        plan.check([OpId("a" * 10**5, "linear"), *MODEL], complete=True)
    assert len(str(caught.value)) < 20_000
