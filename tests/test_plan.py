"""Plans: what they say of operators, files that survive a failed write, and text from anyone."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from qsync_fx.errors import PlanError
from qsync_fx.opid import OpId
from qsync_fx.plan import Choice, Plan
from qsync_fx.plan_file import LARGEST
from qsync_fx.precision import FORMATS

QUERY = OpId("encoder.layer.0.attention.self.query", "linear")
DENSE = OpId("encoder.layer.0.output.dense", "linear")
NORM = OpId("encoder.layer.0.output.LayerNorm", "layer_norm")
POOLER = OpId("pooler.dense", "linear")
RELU = OpId("", "relu", 1, "pooler")
MODEL = (QUERY, DENSE, NORM, POOLER, RELU)

names = st.text(st.characters(exclude_characters="."), min_size=1, max_size=6)
op_ids = st.one_of(
    st.builds(OpId, st.lists(names, min_size=1, max_size=3).map(".".join), names, st.integers(0, 20)),
    st.builds(OpId, st.just(""), names, st.integers(0, 3), st.one_of(st.just(""), names)),
)
precisions = st.sampled_from(sorted(FORMATS))
patterns = st.sampled_from(["**", "*", "a.*", "a.**.b", "*/linear", "/relu@*#1", "é.%2F"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plans = st.builds(
    Plan,
    st.one_of(st.none(), precisions),
    st.lists(st.tuples(patterns, precisions), max_size=4),
    st.dictionaries(op_ids, precisions, max_size=6),
    st.dictionaries(texts, texts, max_size=2),
)


def test_uniform() -> None:
    plan = Plan.uniform("int8")
    assert plan.precision_for(DENSE) == Choice(FORMATS["int8"], "plan: uniform int8", explicit=False)
    assert plan == Plan(default=FORMATS["int8"])
    assert repr(plan) == "Plan.uniform('int8')"


def test_operator_beats_pattern_beats_default() -> None:
    plan = Plan(
        "int8", [("encoder", "fp16"), ("encoder.layer.*.output", "bf16")], {str(NORM): "fp32", str(RELU): "tf32"}
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
def test_what_is_said_last_wins(plan: Plan, op_id: OpId, pattern: str, precision: str) -> None:
    by_pattern = plan.with_precision(pattern, precision)
    for known in (op_id, *plan.operators):
        if known.matches(pattern):
            assert by_pattern.precision_for(known) == Choice(FORMATS[precision], f'plan: pattern "{pattern}"')
        else:
            assert _chosen(by_pattern, known) == _chosen(plan, known)
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
    assert shuffled.to_json() == Plan(plan.default, plan.patterns, plan.operators, {"made by": "another"}).to_json()
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


def test_what_people_read() -> None:
    plan = Plan(
        "int8", [("encoder.layer.*.output", "bf16")], {QUERY: "bf16", NORM: "fp32", RELU: "fp32"}, {"by": "\x1b[2J"}
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
    assert list(json.loads(plan.to_json())["operators"]) == [f"layer.{n}/linear" for n in (0, 1, 2, 10)]


@pytest.mark.parametrize(
    ("arguments", "what", "where"),
    [
        ({"default": "int9"}, "'int9' is not a precision", "default"),
        ({"default": 8}, "a precision is text", "default"),
        ({"patterns": {"a": "int8"}}, "patterns are a list, not an object", "patterns"),
        ({"patterns": ["ab"]}, "this is text", "patterns[0]"),
        ({"patterns": [("a", "int8"), ("b",)]}, "this is 1 things", "patterns[1]"),
        ({"patterns": [("a..b", "int8")]}, "is not a pattern", "patterns[0]"),
        ({"patterns": [(3, "int8")]}, "a pattern is text", "patterns[0]"),
        ({"patterns": [("a", "bf61")]}, "'bf61' is not a precision", "patterns[0]"),
        ({"patterns": [("a", "int8")] * 2001}, "2001 patterns", "patterns"),
        ({"operators": [("a/b", "int8")]}, "operators are a mapping, not a list", "operators"),
        ({"operators": {"linear": "int8"}}, "not an operator id", 'operators["linear"]'),
        ({"operators": {"a/linear": "int"}}, "'int' is not a precision", 'operators["a/linear"]'),
        ({"operators": {7: "int8"}}, "an operator id is text", 'operators["7"]'),
        ({"operators": {OpId("a", "b"): "int8", "a/b": "fp32"}}, "named twice", 'operators["a/b"]'),
        ({"notes": {"seed": 1}}, "a note is text", 'notes["seed"]'),
        ({"notes": "text"}, "notes are a mapping, not text", "notes"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, object], what: str, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**arguments)  # type: ignore[arg-type]
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(where)
    assert caught.value.do


def test_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'bf16'"):
        Plan.uniform("bf61")


# The model


def test_check_passes_plans_of_the_model() -> None:
    Plan.uniform("int8").check(MODEL, complete=True)
    Plan(operators=dict.fromkeys(MODEL, "int8")).check(MODEL, complete=True)
    Plan(operators=dict.fromkeys(MODEL, "int8")).check(MODEL[:2], complete=False)
    Plan(patterns=[("encoder", "int8"), ("**/linear", "bf16"), ("/relu", "fp32")]).check(MODEL, complete=True)
    Plan("int8", [("encoder.layer.*.output", "bf16"), ("nothing", "fp32")], {"x/y": "fp32"}).check(
        MODEL, complete=False
    )


def test_check_lists_missing_and_extra() -> None:
    plan = Plan(operators={f"module.{op_id}": "int8" for op_id in MODEL if op_id.module})
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    error = caught.value
    assert error.what == (
        "the plan has no precision for 5 of the 5 operators and names 4 operators that the model does not have"
    )
    assert error.where is not None
    assert f"missing from the plan: {QUERY}, {DENSE}" in error.where
    assert "in the plan, not in this model: module.encoder.layer.0.attention.self.query/linear" in error.where
    assert error.do is not None
    assert "give the plan a default precision" in error.do
    assert f"nearest to '{QUERY}' in the plan: module.{QUERY}" in error.do
    with pytest.raises(PlanError, match="in the plan, not in this part of the model"):
        plan.check(MODEL, complete=False)


def test_check_lists_ten_and_counts_all() -> None:
    model = [OpId(f"layer.{n}", "linear") for n in range(37)]
    with pytest.raises(PlanError) as caught:
        Plan().check(model, complete=False)
    assert caught.value.where == f"missing from the plan: {', '.join(map(str, model[:10]))}, ... (37 in all)"


def test_check_names_operators_that_the_model_does_not_have() -> None:
    plan = Plan("int8", operators={"pooler.densse/linear": "fp32"})
    plan.check(MODEL, complete=False)
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    assert caught.value.what == "the plan names 1 operator that the model does not have"
    assert caught.value.do is not None
    assert caught.value.do.startswith(
        "use the plan of this model; nearest to 'pooler.densse/linear' in the model: pooler.dense/linear"
    )


@pytest.mark.parametrize(
    ("pattern", "close"),
    [
        ("encoder.layer.*.outputs", "nearest: encoder.layer.0.output"),
        ("pooler.dens/linear", "nearest: pooler.dense/linear"),
        ("zzz", "remove it"),
    ],
)
def test_check_names_patterns_that_select_nothing(pattern: str, close: str) -> None:
    plan = Plan("int8", [("encoder", "bf16"), (pattern, "fp32")])
    plan.check(MODEL, complete=False)
    with pytest.raises(PlanError) as caught:
        plan.check(MODEL, complete=True)
    assert caught.value.what == f"the pattern {pattern!r} selects none of the 5 operators that a plan decides on"
    assert caught.value.where == "patterns[1] of the plan"
    assert caught.value.do is not None
    assert caught.value.do.startswith(close)


def test_check_of_a_large_stranger_ends() -> None:
    plan = Plan(
        operators={OpId("a" * 150 + f".b{n}", "linear"): "int8" for n in range(20_000)} | {"c" * 10**6 + "/d": "int8"}
    )
    with pytest.raises(PlanError) as caught:
        plan.check([OpId("a" * 10**5, "linear"), *MODEL], complete=True)
    assert len(str(caught.value)) < 20_000


# Files


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan("int8", [("encoder", "bf16")], {RELU: "fp32"})
    for path in (tmp_path / "a plan.json", os.fspath(tmp_path / "é.json")):
        Plan.uniform("fp32").save(path)
        plan.save(path)
        assert Plan.load(path) == plan
    assert sorted(os.listdir(tmp_path)) == ["a plan.json", "é.json"]


def test_save_writes_through_links_and_for_others_to_read(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    Plan.uniform("int8").save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o666 & ~umask


def test_save_to_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Plan.uniform("int8").save("plan.json")
    assert Plan.load("plan.json") == Plan.uniform("int8")


FAILED_WRITE = """
import resource, sys
from qsync_fx.errors import PlanError
from qsync_fx.plan import Plan
plan = Plan(operators={f"layer.{n}/linear": "int8" for n in range(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    plan.save(sys.argv[1])
except PlanError as error:
    print(error)
    sys.exit(3)
"""


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform("fp32").save(path)
    done = subprocess.run([sys.executable, "-c", FAILED_WRITE, path], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "the plan is not saved: the file cannot be written: File too large" in done.stdout
    assert Plan.load(path) == Plan.uniform("fp32")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_reader_never_sees_half_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small, large = Plan.uniform("fp32"), Plan(operators={f"layer.{n}/linear": "int8" for n in range(500)})
    small.save(path)

    def write() -> None:
        for _ in range(10):
            large.save(path)
            small.save(path)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert Plan.load(path) in (small, large)
    for writer in writers:
        writer.join()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_save_where_no_plan_can_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path,
        tmp_path / "no folder" / "plan.json",
        tmp_path / "pipe",
        f"{tmp_path}/\0",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.uniform("int8").save(path)
        assert caught.value.where
        assert caught.value.do
    assert os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(PlanError, match="lives at a path, not null"):
        Plan.uniform("int8").save(None)  # type: ignore[arg-type]


def test_load_where_no_plan_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        tmp_path,
        tmp_path / "none.json",
        tmp_path / "pipe",
        tmp_path / "loop",
        "\0",
        "\ud800",
        "/dev/null",
        "",
    ):
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert caught.value.where
        assert caught.value.do
        assert str(caught.value).encode()
    for value in (None, 0, b"plan.json", ["plan.json"]):
        with pytest.raises(PlanError, match="lives at a path"):
            Plan.load(value)  # type: ignore[arg-type]


# Text from anyone

HEAD = '{"format": "qsync-plan", "version": 1'


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "the plan is empty", "line 1, column 1"),
        (" \n", "the plan is empty", "line 2, column 1"),
        ("\0\0\0", "not JSON", "line 1, column 1"),
        ("{", "ends in the middle", "line 1, column 2"),
        (HEAD, "ends in the middle", "line 1"),
        (HEAD + ', "operators": {"a/b": "in', "ends in the middle", "line 1, column 61"),
        (HEAD + "} trailing", "not JSON", "line 1, column 40"),
        ("{'format': 1}", "not JSON", "line 1, column 2"),
        ("[]", "a plan is a JSON object, not a list", None),
        ("NaN", "not the number NaN", None),
        ("1" * 10_000, "not a number of 10000 digits", None),
        ("[" * 100_000, "nested too deeply", None),
        ('{"a":' * 100_000, "nested too deeply", None),
        (HEAD + ', "patterns": ' + "[" * 500 + "]" * 500 + "}", "this is 1 things", "patterns[0]"),
        ("{}", "does not say that it is a plan", "format"),
        ('{"format": "other", "version": 1}', "does not say that it is a plan", "format"),
        ('{"format": "qsync-plan"}', "version is missing", "version"),
        (
            '{"format": "qsync-plan", "version": 2, "new": 1}',
            "has version 2, and this qsync_fx reads version 1",
            "version",
        ),
        ('{"format": "qsync-plan", "version": 0}', "version is the number 0", "version"),
        ('{"format": "qsync-plan", "version": -1}', "version is the number -1", "version"),
        ('{"format": "qsync-plan", "version": 1.0}', "version is the number 1.0", "version"),
        ('{"format": "qsync-plan", "version": true}', "version is true", "version"),
        ('{"format": "qsync-plan", "version": "1"}', "version is text", "version"),
        ('{"format": "qsync-plan", "version": ' + "9" * 10**5 + "}", "version is a number of 100000 digits", "version"),
        ('{"format": "qsync-plan", "version": 1e999}', "version is the number 1e999", "version"),
        (HEAD + ', "operatos": {}}', "no field 'operatos'", None),
        (HEAD + ', "default": NaN}', "not the number NaN", "default"),
        (HEAD + ', "default": 1e999}', "not the number 1e999", "default"),
        (HEAD + ', "default": "int9"}', "'int9' is not a precision", "default"),
        (HEAD + ', "default": "int8", "default": "int8"}', "the key 'default' is written twice", None),
        (HEAD + ', "operators": {"a/b": "int8", "a/b": "fp32"}}', "the key 'a/b' is written twice", "operators"),
        (HEAD + ', "notes": {"a": "", "a": ""}}', "the key 'a' is written twice", "notes"),
        (HEAD + ', "operators": {"a/b": 8}}', "text, not the number 8", 'operators["a/b"]'),
        (HEAD + ', "operators": {"a/b": null}}', "text, not null", 'operators["a/b"]'),
        (HEAD + ', "operators": {"a/b": {"x": 1}}}', "text, not an object", 'operators["a/b"]'),
        (
            HEAD + ', "operators": {"\\u001b[2J": "int8"}}',
            "'\\x1b[2J' is not an operator id",
            'operators["\\u001b[2J"]',
        ),
        (HEAD + ', "operators": null}', "operators are a mapping, not null", "operators"),
        (HEAD + ', "patterns": null}', "patterns are a list, not null", "patterns"),
        (HEAD + ', "patterns": [["a", "int8"], ["b", Infinity]]}', "text, not the number Infinity", "patterns[1]"),
        (HEAD + ', "patterns": [["a", "b", "c"]]}', "this is 3 things", "patterns[0]"),
        (HEAD + ', "patterns": [{"a": "b"}]}', "this is an object", "patterns[0]"),
        (HEAD + ', "notes": {"seed": 1}}', "a note is text", 'notes["seed"], the number 1'),
        (" " * (LARGEST + 1), "larger than", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_text(text: str, what: str, where: str | None, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    error = caught.value
    assert what in error.what
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
        with pytest.raises(PlanError, match="not UTF-8"):
            Plan.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + Plan.uniform("int8").to_json().encode())
    assert Plan.load(path) == Plan.uniform("int8")


@pytest.mark.parametrize("value", [None, 3, {"format": "qsync-plan"}])
def test_text_of_another_type(value: object) -> None:
    with pytest.raises(PlanError, match="read from text"):
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


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), precisions, patterns)
values = st.recursive(
    scalars, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=5), v, max_size=3))
)
almost_plans = st.fixed_dictionaries(
    {"format": st.just("qsync-plan"), "version": st.just(1)},
    optional={
        "default": st.one_of(precisions, values),
        "patterns": st.one_of(
            st.lists(st.one_of(st.lists(scalars, min_size=2, max_size=2), values), max_size=3), values
        ),
        "operators": st.one_of(st.dictionaries(st.one_of(op_ids.map(str), st.text()), scalars, max_size=3), values),
        "notes": st.one_of(st.dictionaries(st.text(), st.text(), max_size=3), values),
        "others": values,
    },
)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(values, almost_plans))
def test_arbitrary_json(value: object) -> None:
    raises_nothing_else(json.dumps(value))


@given(plans, st.data())
def test_damaged_plans(plan: Plan, data: st.DataObject) -> None:
    text = plan.to_json().encode()
    cut = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(PlanError):
        Plan.from_json(text[:cut])
    raises_nothing_else(text[:cut] + data.draw(st.binary(min_size=1, max_size=3)) + text[cut + 1 :])
