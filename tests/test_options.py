"""Backend options: unknown options and values are errors that suggest the nearest valid one."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import qsync_fx
from qsync_fx.errors import OptionError, PlanError, QSyncError
from qsync_fx.formats import FORMATS
from qsync_fx.option_help import DOCUMENTED, LISTS, RECIPES, SWITCHES
from qsync_fx.options import _CHOICES, Options
from qsync_fx.plan import Plan


def test_defaults() -> None:
    expected = Options(
        None,
        None,
        None,
        "inductor",
        "stochastic",
        "nearest",
        "tensor",
        False,
        None,
        None,
        False,
        False,
        None,
        False,
        True,
        False,
        None,
        None,
        (),
    )
    assert Options.parse(None) == Options.parse({}) == Options() == expected


def test_every_option() -> None:
    def custom(graph: object) -> None:
        pass

    given_options = {
        "precision": "int8",
        "inner_backend": "inductor",
        "rounding": "floor",
        "gradient_rounding": "stochastic",
        "scaling": "channel",
        "emulate_unsupported": True,
        "fast_dropout": True,
        "cudagraphs": True,
        "activation_recompute": True,
        "cache_quantized_weights": True,
        "cached_plan": False,
        "strict": True,
        "root": "encoder.layer.0",
        "target": "t4",
        "passes": [custom, "x"],
    }
    expected = Options(
        "int8",
        None,
        None,
        "inductor",
        "floor",
        "stochastic",
        "channel",
        True,
        None,
        True,
        True,
        True,
        None,
        True,
        False,
        True,
        "encoder.layer.0",
        "t4",
        (custom, "x"),
    )
    assert Options.parse(given_options) == expected
    assert Options.parse(expected) is expected


def test_a_plan_or_its_path(tmp_path: Path) -> None:
    plan = Plan("int8", [("encoder", "bf16")])
    path = tmp_path / "plan.json"
    plan.save(path)
    for value in (plan, path, str(path)):
        options = Options.parse({"plan": value})
        assert options.plan == plan
        assert options.precision is None
        assert options == Options(plan=plan)
        assert hash(options) == hash(Options(plan=plan))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_options_that_others_override(name: str) -> None:
    recipe = Options.from_recipe(name)
    assert recipe == Options.parse({"recipe": name}) == Options.parse(dict(RECIPES[name].options))
    assert Options.from_recipe(name, precision="fp32").precision == "fp32"
    planned = Options.parse({"recipe": name, "plan": Plan("int8"), "rounding": "floor"})
    assert planned == dataclasses.replace(
        recipe, precision=None, plan=Plan("int8"), rounding="floor"
    )


def test_an_unknown_recipe_is_refused_by_name() -> None:
    for wrong in ("int8_fats", 8):
        with pytest.raises(OptionError, match='option "recipe" cannot be') as caught:
            Options.parse({"recipe": wrong})
        assert "int8_fast" in caught.value.do


def test_torch_compile_accepts_an_options_object() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    compiled = torch.compile(
        model, backend="qsync", options=Options(precision="bf16", inner_backend="aot_eager")
    )
    compiled(x).sum().backward()
    (operator,) = qsync_fx.plan_coverage(compiled).operators
    assert str(operator.precision) == "bf16"


def test_the_docstring_has_every_option() -> None:
    text = inspect.getdoc(Options) or ""
    assert re.findall(
        r"^ +(\w+): ", text.partition("Attributes:")[2].partition("Raises:")[0], re.MULTILINE
    ) == list(DOCUMENTED)


@pytest.mark.parametrize("name", FORMATS)
def test_precisions(name: str) -> None:
    assert (
        Options.parse({"precision": name})
        == Options.parse({"precision": FORMATS[name]})
        == Options(precision=name)
    )


def test_equal_options_for_equal_mappings() -> None:
    first = Options.parse({"precision": "int8", "passes": ["a"]})
    second = Options.parse({"passes": ("a",), "precision": "int8"})
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    assert first != Options.parse({"precision": "int8"})


def test_every_option_is_documented() -> None:
    fields = {field.name: field for field in dataclasses.fields(Options) if field.init}
    assert list(DOCUMENTED) == list(fields)
    assert {name for name, field in fields.items() if field.default is False} == SWITCHES
    assert {name for name, field in fields.items() if field.default == ()} == LISTS
    for name, choices in _CHOICES.items():
        for choice in choices:
            assert f'"{choice}"' in DOCUMENTED[name], (
                "the text of an option lists each of its values"
            )
        assert f'"{fields[name].default}" (default' in DOCUMENTED[name]
    for name, field in fields.items():
        if isinstance(field.default, str):
            assert name in _CHOICES, "an option with a string default has a list of its values"


@pytest.mark.parametrize(
    ("mapping", "message", "do"),
    [
        (
            {"precison": "int8"},
            "unknown option 'precison'",
            "did you mean 'precision'? known: activation_recompute, cache_quantized_weights, "
            "cached_plan, cudagraphs, device_class,",
        ),
        (
            {"zzzzzz": 1},
            "unknown option 'zzzzzz'",
            "known: activation_recompute, cache_quantized_weights, cached_plan, cudagraphs, "
            "device_class,",
        ),
        (
            {3: 1},
            "unknown option the number 3",
            "known: activation_recompute, cache_quantized_weights, cached_plan, cudagraphs, "
            "device_class,",
        ),
        (
            {"precision": "int9"},
            "\"precision\" cannot be 'int9'",
            "did you mean 'int8'? known: bf16,",
        ),
        ({"precision": 8}, '"precision" cannot be the number 8', "known: bf16,"),
        ({"precision": ""}, "\"precision\" cannot be ''", "known: bf16,"),
        ({"plan": 8}, '"plan" cannot be the number 8', "pass a Plan, a path"),
        (
            {"inner_backend": "inducter"},
            "\"inner_backend\" cannot be 'inducter'",
            "did you mean 'inductor'? known: aot_eager, eager, inductor",
        ),
        (
            {"inner_backend": None},
            '"inner_backend" cannot be null',
            "known: aot_eager, eager, inductor",
        ),
        ({"rounding": "Nearest"}, "\"rounding\" cannot be 'Nearest'", "did you mean 'nearest'?"),
        ({"scaling": ["tensor"]}, '"scaling" cannot be a list', "known: channel, tensor"),
        (
            {"emulate_unsupported": 1},
            '"emulate_unsupported" cannot be the number 1',
            "use True or False",
        ),
        (
            {"emulate_unsupported": "true"},
            "\"emulate_unsupported\" cannot be 'true'",
            "use True or False",
        ),
        (
            {"cudagraphs": True, "inner_backend": "aot_eager"},
            '"cudagraphs" requires "inner_backend": "inductor", not "aot_eager"',
            "remove one of them",
        ),
        (
            {"fast_dropout": True, "inner_backend": "aot_eager"},
            '"fast_dropout" requires "inner_backend": "inductor", not "aot_eager"',
            "remove one of them",
        ),
        (
            {"activation_recompute": True, "inner_backend": "aot_eager"},
            '"activation_recompute" requires "inner_backend": "inductor", not "aot_eager"',
            "remove one of them",
        ),
        (
            {"emulate_unsupported": True, "skip_unprofitable": True},
            '"emulate_unsupported" runs every planned format',
            "remove one of them",
        ),
        (
            {"passes": print},
            '"passes" cannot be a value of type builtin_function_or_method',
            "use a list",
        ),
        ([("precision", "int8")], "options must be a dictionary, not a list", "write options="),
        ("int8", "options must be a dictionary, not text", "write options="),
    ],
)
def test_errors(mapping: Mapping[str, object], message: str, do: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(mapping)
    assert message in caught.value.what
    assert caught.value.do is not None
    assert caught.value.do.startswith(do)


def test_invalid_value_shows_the_help_of_its_option() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"scaling": "row"})
    assert caught.value.where == f'option "scaling": {DOCUMENTED["scaling"]}'


def test_precision_with_plan_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    plan = Plan.uniform("bf16")
    plan.save(tmp_path / "plan.json")
    for value in (plan, tmp_path / "plan.json"):
        with pytest.raises(OptionError) as caught:
            Options.parse({"precision": "int8", "plan": value})
        assert caught.value.do is not None
        for advice in (
            'remove "precision"',
            "plan.with_precision(pattern, 'int8')",
            'remove "plan"',
            "to train every operator in int8",
        ):
            assert advice in caught.value.do


def test_a_plan_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json"):
        Options.parse({"plan": tmp_path / "none.json"})


@pytest.mark.parametrize("precision", ["BF16", torch.bfloat16, FORMATS["bf16"]], ids=str)
def test_precision_in_any_spelling(precision: Any) -> None:
    assert Options.parse({"precision": precision}) == Options(precision=precision)
    assert Options(precision=precision).precision == "bf16"


def test_plan_as_a_dictionary() -> None:
    options = Options.parse({"plan": {"default": "int8", "head": "FP32"}})
    assert options.plan == qsync_fx.Plan("int8", [("head", "fp32")])
    with pytest.raises(qsync_fx.PlanError, match="'itn8' is not a precision"):
        Options.parse({"plan": {"head": "itn8"}})


def test_one_pass_without_a_list() -> None:
    @qsync_fx.graph_pass
    def mine(graph: qsync_fx.PrecisionGraph) -> None:
        """Change nothing."""

    assert Options.parse({"passes": mine}).passes == (mine,)
    assert Options(passes=mine).passes == (mine,)


def test_fields_are_checked_without_parse_too() -> None:
    for wrong in (
        {"precision": "int9"},
        {"plan": 8},
        {"inner_backend": "x"},
        {"passes": print},
        {"emulate_unsupported": 0},
    ):
        with pytest.raises(OptionError):
            Options(**wrong)


values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.binary(),
    st.lists(st.text(), max_size=2),
    st.sampled_from(["int8", "eager", "floor", "channel", Plan.uniform("int8"), FORMATS["fp8"]]),
)


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(DOCUMENTED)), st.text(max_size=4), st.integers()),
        values,
        max_size=3,
    )
)
def test_anything_is_understood_or_a_qsync_error(mapping: dict[Any, Any]) -> None:
    try:
        options = Options.parse(mapping)
    except QSyncError as error:
        text = str(error)
    else:
        text = repr(options)
        assert set(mapping) <= set(DOCUMENTED)
    assert text
