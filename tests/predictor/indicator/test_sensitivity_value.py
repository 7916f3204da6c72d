"""`Sensitivity`: lookups, text, and files from untrusted sources."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.indicator.sensitivity_map import CHECKS, SENSITIVITY, Sensitivity
from qsync_fx.serialization import Schema

FOUND = Sensitivity(
    "second_order",
    "Net",
    {"a/linear": {"int8": 3.0, "bf16": 0.5}, "b/linear": {"int8": 1.0, "bf16": 0.0}},
    2,
    [
        {"a/linear": {"int8": 2.0}, "b/linear": {"int8": 2.5}},
        {"a/linear": {"int8": 4.0}, "b/linear": {"int8": 0.5}},
    ],
    1.5,
)


def test_sensitivity_gives_the_added_variance() -> None:
    assert FOUND.of("a/linear", "int8") == 3.0
    assert FOUND.of("b/linear", "fp32") == FOUND.of("b/linear", "fp64") == 0.0
    assert (FOUND.operators, FOUND.precisions) == (["a/linear", "b/linear"], ["int8", "bf16"])
    with pytest.raises(ProfileError, match="did you mean 'a/linear'"):
        FOUND.of("a/linea", "int8")
    with pytest.raises(ProfileError, match="was not computed"):
        FOUND.of("a/linear", "fp16")


def test_it_prints_as_a_table() -> None:
    assert str(FOUND).splitlines() == [
        "",
        " operator       int8   of int8       bf16   of bf16",
        " " + "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 50,
        " a/linear   3.00e+00     75.0%   5.00e-01    100.0%",
        " b/linear   1.00e+00     25.0%   0.00e+00      0.0%",
        "",
        "variance added to the gradients of Net, method second_order, mean over 2 steps, 2 s",
    ]


def test_a_file_gives_back_the_value(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "s.json")
    assert Sensitivity.load(tmp_path / "s.json") == FOUND
    overflow = Sensitivity("second_order", "Net", {"a/linear": {"int8": math.inf}})
    assert SENSITIVITY.decode(overflow.to_json()).of("a/linear", "int8") > 1e308


HEAD = {"format": "qsync-sensitivity", "version": 1, "method": "second_order", "model": "Net"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "qsync-plan", "version": 1}',
        json.dumps({**HEAD, "version": 2, "variance": {}}),
        json.dumps({**HEAD, "variance": {"a": {"int8": 1.0}}}),
        json.dumps({**HEAD, "variance": {"a/linear": {"int9": 1.0}}}),
        json.dumps({**HEAD, "variance": {"a/linear": {"int8": -1.0}}}),
        json.dumps({**HEAD, "variance": {"a/linear": {"int8": "1"}}}),
        json.dumps({**HEAD, "variance": {"a/linear": {"int8": math.nan}}}),
        json.dumps({**HEAD, "variance": {"a/linear": {"int8": math.inf}}}),
        json.dumps({**HEAD, "variance": {"a/linear": 1.0}}),
        json.dumps({**HEAD, "variance": {}, "trace": [{"a/linear": {"int8": -1}}]}),
        json.dumps({**HEAD, "variance": {}, "steps": -1}),
        json.dumps({**HEAD, "variance": {}, "more": 1}),
        FOUND.to_json()[:-20],
    ],
)
def test_hostile_text_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(ProfileError) as raised:
        SENSITIVITY.decode(text)
    assert raised.value.do


@dataclass(frozen=True)
class Holder:
    device: str
    sensitivity: Sensitivity | None = None


def test_sensitivity_is_embedded_in_other_files() -> None:
    holders = Schema(Holder, "profile", ProfileError, "measure again", "test", checks=CHECKS)
    for sensitivity in (FOUND, None):
        assert holders.decode(holders.encode(Holder("cpu", sensitivity))) == Holder(
            "cpu", sensitivity
        )
    hostile = holders.encode(Holder("cpu", FOUND)).replace("a/linear", "a linear")
    with pytest.raises(ProfileError, match="is not an operator id"):
        holders.decode(hostile)


def test_a_negative_variance_or_nan_is_none() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(ProfileError, match="is no variance"):
            Sensitivity("second_order", "Net", {"a/linear": {"int8": wrong}})
