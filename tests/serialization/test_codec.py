"""Decoding of untrusted files: the result is the written value, or an error with its cause,
location and remedy.
"""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import example, given, strategies as st

from qsync_fx.backend.cuda.kernel_build.library import MANIFEST, Manifest, Resources
from qsync_fx.backend.cuda.tuning import (
    RECORDING,
    TABLE,
    TunedChoice,
    choice_as_json,
    problem_as_json,
)
from qsync_fx.errors import QSyncError
from qsync_fx.plan import Plan
from qsync_fx.plan.plan import PLAN
from qsync_fx.serialization import Schema
from tests.support.cuda.tuning_samples import BF16, CONV, HERE, INT8


@dataclass(frozen=True)
class Circle:
    kind: ClassVar = "circle"
    radius: float


@dataclass(frozen=True)
class Box:
    kind: ClassVar = "box"
    size: tuple[int, int]
    name: str | None = None


@dataclass(frozen=True)
class Drawing:
    shapes: list[Circle | Box]
    colours: Mapping[str, Literal["red", "green"]]
    layers: dict[str, list[int]]
    visible: bool
    order: tuple[str, ...] = ()
    zoom: Literal[1, 2] = 1
    notes: Mapping[str, str] = field(default_factory=dict)


class DrawingError(QSyncError):
    pass


def negative(circle: Circle) -> str | None:
    return "a circle has no negative radius" if circle.radius < 0 else None


DRAWING = Schema(
    Drawing,
    noun="drawing",
    error=DrawingError,
    remedy="draw it again",
    name="a drawing",
    version=3,
    largest=2**20,
    checks={Circle: negative},
)
numbers = st.floats(min_value=0, allow_infinity=False)
integers = st.integers(-(10**30), 10**30)
circles = st.builds(Circle, numbers)
boxes = st.builds(Box, st.tuples(integers, integers), st.none() | st.text())
drawings = st.builds(
    Drawing,
    st.lists(circles | boxes, max_size=3),
    st.dictionaries(st.text(), st.sampled_from(["red", "green"]), max_size=3),
    st.dictionaries(st.text(), st.lists(integers, max_size=3), max_size=3),
    st.booleans(),
    st.lists(st.text(), max_size=3).map(tuple),
    st.sampled_from([1, 2]),
    st.dictionaries(st.text(), st.text(), max_size=3),
)
SAMPLE = Drawing([Circle(0.5), Box((1, 2), "b")], {"sky": "red"}, {"one": [1, 2]}, True)


@given(drawings)
@example(SAMPLE)
def test_values_are_saved_and_loaded(drawing: Drawing) -> None:
    text = DRAWING.encode(drawing)
    assert DRAWING.decode(text) == DRAWING.decode(text.encode()) == drawing
    assert json.loads(text) == DRAWING.plain(drawing)


def test_fields_with_a_default_may_be_missing() -> None:
    head = {"format": "a drawing", "version": 3}
    body = {
        "shapes": [{"kind": "box", "size": [1, 2]}],
        "colours": {},
        "layers": {},
        "visible": False,
    }
    assert DRAWING.decode(json.dumps(head | body)) == Drawing([Box((1, 2))], {}, {}, False)


@pytest.mark.parametrize(
    ("path", "value", "message", "where"),
    [
        (
            ("version",),
            4,
            "the drawing has version 4, but this qsync_fx reads version 3",
            "version",
        ),
        (("version",), 3.0, "the drawing's version is the number 3.0", "version"),
        (("shape",), 1, "the drawing has an unknown field 'shape'", None),
        (("shapes",), "ab", "the drawing has text instead of a list", "shapes"),
        (("shapes",), {"0": 1}, "the drawing has an object instead of a list", "shapes"),
        (("shapes", 0), None, "the drawing has null instead of an object", "shapes[0]"),
        (
            ("shapes", 0, "kind"),
            "cone",
            "the drawing has text instead of 'circle' or 'box'",
            "shapes[0].kind",
        ),
        (
            ("shapes", 0, "radius"),
            "1",
            "the drawing has text instead of a number",
            "shapes[0].radius",
        ),
        (
            ("shapes", 0, "radius"),
            True,
            "the drawing has true instead of a number",
            "shapes[0].radius",
        ),
        (
            ("shapes", 0, "radius"),
            math.inf,
            "has the number inf instead of a number",
            "shapes[0].radius",
        ),
        (("shapes", 0, "radius"), -1, "a circle has no negative radius", "shapes[0]"),
        (("shapes", 0, "r"), 1, "the drawing has an unknown field 'r'", "shapes[0]"),
        (
            ("shapes", 1, "size"),
            [1],
            "the drawing has a list instead of a list of 2",
            "shapes[1].size",
        ),
        (
            ("shapes", 1, "size", 1),
            2.0,
            "has the number 2.0 instead of an integer",
            "shapes[1].size[1]",
        ),
        (
            ("shapes", 1, "name"),
            7,
            "the drawing has the number 7 instead of text",
            "shapes[1].name",
        ),
        (
            ("colours", "a/b"),
            "blue",
            "the drawing has text instead of 'red' or 'green'",
            'colours["a/b"]',
        ),
        (
            ("shapes", 0, "radius"),
            10**400,
            "has the number 1000000000000000000000000000000000000000 instead of a number",
            "shapes[0].radius",
        ),
        (("visible",), 1, "the drawing has the number 1 instead of true or false", "visible"),
        (("zoom",), True, "the drawing has true instead of 1 or 2", "zoom"),
        (("zoom",), 1.0, "the drawing has the number 1.0 instead of 1 or 2", "zoom"),
        (("notes",), [["a", "b"]], "the drawing has a list instead of an object", "notes"),
    ],
    ids=str,
)
def test_invalid_field_is_reported_with_its_path(
    path: tuple[str | int, ...], value: object, message: str, where: str | None
) -> None:
    tree = json.loads(DRAWING.encode(SAMPLE))
    container: Any = tree
    for step in path[:-1]:
        container = container[step]
    container[path[-1]] = value
    with pytest.raises(DrawingError) as caught:
        DRAWING.decode(json.dumps(tree))
    assert message in caught.value.what
    assert caught.value.where == where
    assert caught.value.do


def test_the_first_of_many_wrong_values_ends_the_reading() -> None:
    many = json.dumps(DRAWING.plain(SAMPLE)).replace("[1, 2]", "[" + "{}," * 30_000 + "1]", 1)
    tracemalloc.start()
    with pytest.raises(DrawingError):
        DRAWING.decode(many)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 * len(many)


CHOICE = TunedChoice(INT8, "torch", {"torch": 0.5}, {"other": "why"}, True)
MADE = Manifest(
    "0" * 64,
    "1" * 64,
    "small",
    "sm_90a",
    "2" * 64,
    1,
    "",
    Resources(1, 2, 3, 4),
    "",
    1.5,
    2.5,
    "nvcc",
)
FILES: dict[str, tuple[Schema[Any], Any]] = {
    "plan": (
        PLAN,
        json.loads(Plan("int8", [("a", "bf16")], {"b/linear": "fp32"}, {"by": "me"}).to_json()),
    ),
    "manifest": (MANIFEST, json.loads(MANIFEST.encode(MADE))),
    "tuning table": (
        TABLE,
        {
            "format": "qsync tuning table",
            "version": 1,
            "environment": vars(HERE),
            "choices": [
                choice_as_json(CHOICE),
                choice_as_json(TunedChoice(CONV, "torch", {"torch": 2.0})),
            ],
        },
    ),
    "recording": (
        RECORDING,
        {
            "format": "qsync recorded timings",
            "version": 1,
            "environment": vars(HERE),
            "arch": "sm_80",
            "timings": [
                {"problem": problem_as_json(problem), "seconds": {"torch": [1.0]}}
                for problem in (BF16, CONV)
            ],
        },
    ),
    "drawing": (DRAWING, DRAWING.plain(SAMPLE)),
}


def places(tree: object) -> Iterator[tuple[Any, Any]]:
    """Yield each object and list in a tree with each of its keys."""
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    )
    for key in keys:
        yield tree, key
        yield from places(tree[key])  # type: ignore[index]


@pytest.mark.parametrize("name", FILES)
def test_every_value_of_another_type_and_every_other_field_is_refused(name: str) -> None:
    """Covers values of other types, unknown fields and duplicate keys."""
    schema, tree = FILES[name]
    text = json.dumps(tree)
    assert schema.noun == name
    schema.decode(text)
    rejected = 0
    for holder, key in places(tree):
        original = holder[key]
        for wrong in ([[[]]], {"no such field": 1}):
            holder[key] = wrong
            if name != "plan" or key in ("format", "version"):
                with pytest.raises(schema.error) as caught:
                    schema.decode(json.dumps(tree))
                assert caught.value.do and caught.value.where
                rejected += 1
        holder[key] = original
        if isinstance(holder, dict):
            twice = json.dumps(tree).replace(
                f"{json.dumps(key)}: ", f"{json.dumps(key)}: 1, {json.dumps(key)}: ", 1
            )
            with pytest.raises(schema.error):
                schema.decode(twice)
    assert json.dumps(tree) == text and rejected >= 4
