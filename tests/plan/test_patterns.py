"""Patterns of operator ids, compared with a plain reference matcher."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings, strategies as st

from qsync_fx.errors import PlanError
from qsync_fx.plan.operator_id import OpId, pattern_regex
from tests.support.planning.drawn_ids import op_ids


@pytest.mark.parametrize(
    ("pattern", "selected", "others"),
    [
        (
            "encoder.layer.*.output",
            ["encoder.layer.0.output.dense/linear", "encoder.layer.0.output.LayerNorm/layer_norm"],
            ["encoder.layer.0.attention.output.dense/linear", "encoder.layer.0.outputs/linear"],
        ),
        (
            "encoder",
            ["encoder/add", "encoder.a.b/linear#3"],
            ["encoders/add", "/relu@encoder", "a.encoder/add"],
        ),
        (
            "**.output",
            ["output/add", "a.output/add", "a.b.output.dense/linear"],
            ["a.outputs/add", "/output"],
        ),
        ("a.**.b", ["a.b/add", "a.x.b/add", "a.x.y.b.c/add"], ["a.x/add", "b.a/add"]),
        ("a.**", ["a/add", "a.b/add", "a.b.c/add"], ["b/add"]),
        ("*", ["a/add", "a.b/add"], ["/relu", "/relu@a"]),
        ("**", ["a/add", "a.b.c/add#2", "/relu", "/relu@a#1"], []),
        (
            "layer*.conv?",
            ["layer1.conv1/conv2d", "layer.convé/conv2d"],
            ["layer1.conv/conv2d", "layer1.conv12/conv2d"],
        ),
        ("layer.[02]", ["layer.0.a/add", "layer.2/add"], ["layer.1/add", "layer.02/add"]),
        (
            "layer.[0-2a]?",
            ["layer.1x/add", "layer.a9/add"],
            ["layer.1/add", "layer.3x/add", "layer.-x/add"],
        ),
        (
            "layer.[!0-2]",
            ["layer.3/add", "layer.%2F/add"],
            ["layer.0/add", "layer.33/add", "layer/add"],
        ),
        ("layer.[^0]", ["layer.3/add", "layer.^/add"], ["layer.0/add"]),
        ("layer.{0,2}", ["layer.0.a/add", "layer.2/add"], ["layer.1/add", "layer.20/add"]),
        (
            "layer.{9..11, 3}",
            ["layer.3/add", "layer.9/add", "layer.10/add", "layer.11/add"],
            ["layer.1/add", "layer.8/add"],
        ),
        (
            "*.{attention,output.dense}",
            ["a.attention.b/add", "a.output.dense/add"],
            ["a.output/add", "attention/add"],
        ),
        ("a.{b/linear,c/matmul#1}", ["a.b/linear", "a.c/matmul#1"], ["a.c/matmul", "a.b/matmul"]),
        ("a{,s}/{conv,linear}*", ["a/conv2d", "as/linear"], ["ass/linear", "a/matmul"]),
        ("a/conv?d", ["a/conv2d", "a/conv1d#3"], ["a/conv_d_", "a/convd"]),
        (
            "/relu@layer[13].?",
            ["/relu@layer1.0", "/relu@layer3.1#2"],
            ["/relu@layer2.0", "/relu@layer1.10"],
        ),
        ("heads.*25", ["heads.a25/linear"], ["heads.50%25/linear"]),
        (
            "heads.?",
            ["heads.%0A/linear", "heads.%E2%80%A8/linear", "heads.%ED%A0%80/linear"],
            ["heads.%0A%0A/linear"],
        ),
        (
            "heads.[%5B%5D]",
            ["heads.%5B/linear", "heads.%5D/linear"],
            ["heads.5/linear", "heads.%7B/linear"],
        ),
        ("layer*.conv*1", ["layer1.conv11/conv2d", "layer.conv1/conv2d"], ["layer1.conv12/conv2d"]),
        (
            "a.*/linear",
            ["a.b/linear", "a.b/linear#1"],
            ["a/linear", "a.b.c/linear", "a.b/linear_gelu"],
        ),
        (
            "**/embedding",
            ["embedding.word/embedding", "/embedding", "/embedding@x#1"],
            ["embedding/linear"],
        ),
        ("a/*mm", ["a/mm", "a/bmm#3"], ["a/mmm_", "a.b/mm"]),
        ("a/matmul#0", ["a/matmul"], ["a/matmul#1", "a/matmul#10"]),
        ("a/matmul#1", ["a/matmul#1"], ["a/matmul", "a/matmul#10"]),
        ("/relu", ["/relu", "/relu#1", "/relu@layer3.1", "/relu@layer3.1#2"], ["a/relu"]),
        ("/relu@", ["/relu", "/relu#1"], ["/relu@layer3.1"]),
        (
            "/relu@layer3.1",
            ["/relu@layer3.1", "/relu@layer3.1#2"],
            ["/relu", "/relu@layer3", "/relu@layer3.1.a"],
        ),
        (
            "/relu@layer3.**#2",
            ["/relu@layer3.1#2", "/relu@layer3#2"],
            ["/relu@layer3.1", "/relu@layer4.1#2"],
        ),
        ("/*@**.conv*", ["/relu@conv1", "/add@layer3.1.conv2#2"], ["/relu", "/relu@conv1.a"]),
        ("heads.a%2Fb", ["heads.a%2Fb/linear"], ["heads.a/linear"]),
        ("heads.a+(b", ["heads.a+(b/linear"], ["heads.aa(b/linear"]),
    ],
)
def test_patterns(pattern: str, selected: list[str], others: list[str]) -> None:
    assert [text for text in selected + others if OpId.parse(text).matches(pattern)] == selected


@pytest.mark.parametrize(
    "pattern",
    [
        *("", ".", "a..b", ".a", "a.", "a.**b", "***", "a/", "/", "a/b/c", "a/**", "a#1", "a@b"),
        *(
            "a/b#",
            "a/b#x",
            "a/b#-1",
            "a/b#01",
            "a/b#²",
            "a/b@c@d",
            "a/b@c..d",
            "a/b#1@c",
            "a/b#1/c",
        ),
        *("a\nb", "\ud800", "a" * 1001, "*." * 600 + "*"),
        *(
            "a[",
            "a]",
            "a[]",
            "a[!]",
            "a[0",
            "a[.]",
            "a[[0]",
            "a[*]",
            "a[9-0]",
            "a[a-9]",
            "a/[0",
            "a[a/b]",
            "a@[0]",
        ),
        *(
            "a{",
            "a}",
            "a{}",
            "a{0",
            "a{b{c,d}}",
            "[{]",
            "{0..99999}",
            "{0..99}" * 9,
            "a{,.}",
            "a{b,*}*",
            "%",
            "a%2",
            "a%2f",
        ),
    ],
)
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(PlanError) as caught:
        OpId("a", "b").matches(pattern)
    assert pattern == "" or caught.value.do


@pytest.mark.parametrize("pattern", [None, 3, b"a", []])
def test_pattern_of_another_type(pattern: object) -> None:
    with pytest.raises(PlanError, match="a pattern must be a string"):
        OpId("a", "b").matches(pattern)  # type: ignore[arg-type]


# The reference matches structured patterns with unescaped names by exhaustive search. Only the code
# under test uses texts and their escapes. A glob is a list of "*", "?", ("!", characters) for any
# other character, or a string of accepted characters.
Glob = list[str | tuple[str, str]]


def glob(pattern: Glob, text: str) -> bool:
    if not pattern:
        return not text
    first, rest = pattern[0], pattern[1:]
    if first == "*":
        return any(glob(rest, text[n:]) for n in range(len(text) + 1))
    if not text or not glob(rest, text[1:]):
        return False
    return first == "?" or (
        text[0] not in first[1] if isinstance(first, tuple) else text[0] in first
    )


def path(pattern: list[Glob | None], segments: list[str]) -> bool:
    """Return whether a pattern matches all segments. None in the pattern is "**"."""
    if not pattern:
        return not segments
    if pattern[0] is None:
        return any(path(pattern[1:], segments[n:]) for n in range(len(segments) + 1))
    return bool(segments) and glob(pattern[0], segments[0]) and path(pattern[1:], segments[1:])


def split(path: str) -> list[str]:
    return path.split(".") if path else []


def reference(globs: list[Glob | None], operator: Glob | None, op_id: OpId) -> bool:
    """Return the result of `OpId.matches` for a pattern without # and @. Without an operator the
    pattern selects modules.
    """
    segments = split(op_id.module)
    if operator is None:
        return any(path(globs, segments[:n]) for n in range(len(segments) + 1))
    return path(globs, segments) and glob(operator, op_id.operator)


def escaped(characters: str) -> str:
    return "".join(str(OpId(character, "x")).removesuffix("/x") for character in characters)


def written(pattern: Glob) -> str:
    def part(element: str | tuple[str, str]) -> str:
        if element in ("*", "?"):
            return str(element)
        if isinstance(element, tuple):
            return f"[!{escaped(element[1])}]"
        return escaped(element) if len(element) == 1 else f"[{escaped(element)}]"

    return "".join(map(part, pattern))


def written_path(globs: list[Glob | None]) -> str:
    return ".".join("**" if segment is None else written(segment) for segment in globs)


# Every character that needs an escape or has a meaning in a class, and a few that names have in
# common.
letters = st.sampled_from("ab") | st.sampled_from("ab01-^!%[]{}?/#@,\n\ud800é\u2028")
classes = st.lists(
    letters.filter(lambda c: c not in "-^!"), min_size=2, max_size=3, unique=True
).map("".join)
parts = st.one_of(st.just("*"), st.just("?"), letters, classes, classes.map(lambda c: ("!", c)))
segment_globs = st.lists(parts, min_size=1, max_size=4).filter(
    lambda glob: "**" not in written(glob) and glob != ["*", "*"]
)
path_globs = st.lists(st.none() | segment_globs, min_size=1, max_size=5)
short_names = st.text(letters, min_size=1, max_size=3)
short_paths = st.lists(short_names, max_size=4).map(".".join)


@settings(max_examples=500)
@given(
    path_globs,
    st.none() | segment_globs,
    st.builds(OpId, short_paths, short_names, st.integers(0, 2)),
)
@example([None, ["a"], None, ["b"]], None, OpId("a.a.b.b", "a"))
@example([["a"], None, ["a", "*", "b"]], ["a"], OpId("a.ab.aab.abb", "a"))
@example([["*", "?", "0"]], None, OpId("a[0", "a"))
@example([["*", "2", "5"]], None, OpId("a%", "a"))
@example([["?"]], None, OpId("\n\u2028", "a"))
def test_patterns_against_the_reference(
    globs: list[Glob | None], operator: Glob | None, op_id: OpId
) -> None:
    pattern = written_path(globs) + ("" if operator is None else f"/{written(operator)}")
    assert op_id.matches(pattern) == reference(globs, operator, op_id)


@given(path_globs, short_paths)
def test_after_matches_complete_paths(globs: list[Glob | None], after: str) -> None:
    assert OpId("", "relu", 1, after).matches(f"/relu@{written_path(globs)}") == (
        after != "" and path(globs, split(after))
    )


plain_texts = st.text("ab*0.,/", min_size=1, max_size=4)


@given(
    st.lists(
        plain_texts | st.lists(st.text("ab*0.", max_size=3), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    op_ids,
)
def test_braces_stand_for_each_pattern_that_they_write_out(
    parts: list[str | list[str]], op_id: OpId
) -> None:
    pattern = "".join(part if isinstance(part, str) else f"{{{','.join(part)}}}" for part in parts)
    each = [
        "".join(chosen)
        for chosen in itertools.product(
            *([part] if isinstance(part, str) else part for part in parts)
        )
    ]
    try:
        expected = sum(op_id.matches(alternative) for alternative in each) > 0
    except PlanError:
        expected = None
    try:
        assert op_id.matches(pattern) == expected
    except PlanError:
        assert expected is None or "{}" in pattern


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
def test_a_range_of_numbers(first: int, last: int, number: int) -> None:
    expected = min(first, last) <= number <= max(first, last)
    assert OpId(f"layer.{number}.dense", "linear").matches(f"layer.{{{first}..{last}}}") == expected


@given(op_ids)
def test_an_id_is_a_pattern_of_itself(op_id: OpId) -> None:
    text = str(op_id)
    assert op_id.matches(text)
    assert op_id.matches("**")
    assert OpId(
        op_id.module,
        op_id.operator,
        op_id.index + 1 if op_id.index < 999_999_999 else 0,
        op_id.after,
    ).matches(text) == (op_id.index == 0)


@given(st.text(st.sampled_from("ab./#@%0125*(?[]{},!^-\\\n")))
def test_invalid_patterns_raise_only_plan_errors(pattern: str) -> None:
    try:
        pattern_regex(pattern)
    except PlanError:
        return
    OpId("a", "b").matches(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "**." + "a*" * 300 + "b",
        "**.a." * 150 + "b",
        "**.a*a.a*a.**." * 40 + "b/c",
        "a." * 400 + "b",
        "**." + "*a*." * 100 + "b",
        "**." + "?*[ab]" * 150 + "b",
        "**.[!b]?." * 40 + "{b,c}{0..9}",
    ],
)
def test_no_pattern_is_slow(pattern: str) -> None:
    """Backtracking over these patterns would take exponential time."""
    for module in ("a" * 20_000, ".".join(["a"] * 2_000), ".".join(["aaaa"] * 2_000)):
        assert not OpId(module, "linear").matches(pattern)
