"""Plain English in the prose of code, messages and pages.

The patterns below are symptoms of sentences that hide their subject or invent a term. Each has a
limit in occurrences per 10,000 words. Rewrite a sentence for its meaning, not word by word.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.source_files import BENCHMARKS, PRODUCT, ROOT, TESTS, python_files


@dataclass(frozen=True)
class Pattern:
    """Words that a plain sentence does not need.

    Attributes:
        words: regular expression; upper and lower case are equal.
        instead: words to write instead.
        limit: limit per 10,000 words.
    """

    words: str
    instead: str
    limit: float


PATTERNS = (
    Pattern(
        r"what (?:an?|the|is|its?|of|they|their|was|has|each|all|others?|follows|comes|stands|runs"
        r"|reads|keeps|makes|takes)",
        instead="the noun: 'the saved tensors', 'the cost of a cast'",
        limit=4,
    ),
    Pattern("told|tells", "report, log, raise, return", 1),
    Pattern("beside", "next to, in parallel with, compared with", 0.5),
    Pattern(
        r"reckon\w*|foresee\w*|foresaw|anew|thereof|wherein|whereby",
        instead="compute, predict, again",
        limit=1,
    ),
    Pattern("lies|lay|lying", "is stored, is located", 1),
    Pattern("of (?:those|that|which|these)|those of|that of", "the noun again", 5),
    Pattern("asks|asked", "request, query, require", 1.5),
    Pattern("holds|held", "contain, store, be valid", 6),
    Pattern("keeps|kept", "store, save, retain, preserve", 10),
    Pattern("takes|taken", "accept, use, require", 12),
    Pattern("stands|stood", "be", 1),
    Pattern("in (?:the )?place of", "instead of", 1),
    Pattern(
        "turned|filled up|stretch(?:es)?|dear|alike",
        instead="transposed, padded, segment, expensive, equal",
        limit=1,
    ),
    Pattern("where (?:there|nobody|nothing|no one|it|that|they)", "if, when", 2.5),
    Pattern(
        "nobody|no one|nothing|whoever|whatever|whichever",
        instead="the subject: the user, no pass, any plan",
        limit=5,
    ),
)

CODE = {"product": PRODUCT, "benchmarks": BENCHMARKS, "tests": TESTS, "native": ("cpp",)}

CONDITIONAL_EXPRESSIONS = {"product": 10.0, "benchmarks": 10.0}
"""Limits per 1,000 lines: `a if c else b` hides control flow. Lower them; never raise them."""

FEWEST_WORDS = 4
"""Minimum words of a text; shorter string literals are mostly names."""

Place = tuple[str, str]
"""Position as file and line, and the words there."""


def prose(source: str, where: str) -> Iterator[Place]:
    """Yield docstrings and comments of Python source, line by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and (text := _string(node.value)) is not None:
            for number, line in enumerate(text.splitlines(), node.lineno):
                yield f"{where}:{number}", line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield f"{where}:{token.start[0]}", token.string


def texts(source: str, where: str) -> Iterator[Place]:
    """Yield string literals of Python source that are sentences, except docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (text := _string(node)) is None or id(node) in docstrings:
            continue
        if len(text.split()) >= FEWEST_WORDS:
            yield f"{where}:{node.lineno}", text  # type: ignore[attr-defined]


def _string(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def page(markdown: str, where: str) -> Iterator[Place]:
    """Yield the lines of a Markdown page outside its code blocks."""
    fenced = False
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield f"{where}:{number}", line


def cpp_comments(source: str, where: str) -> Iterator[Place]:
    """Yield the comments of C++ source, line by line."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?://|^\s*\*|/\*)(.*)", line):
            yield f"{where}:{number}", comment[1]


def problems(places: Iterable[Place]) -> list[str]:
    """Return the patterns whose limit is exceeded."""
    lines = list(places)
    words = sum(len(text.split()) for _, text in lines)
    result = []
    for pattern in PATTERNS:
        expression = re.compile(rf"\b(?:{pattern.words})\b", re.IGNORECASE)
        matches = [
            (where, match[0]) for where, text in lines for match in expression.finditer(text)
        ]
        rate = 1e4 * len(matches) / max(words, 1)
        if rate > pattern.limit:
            examples = "".join(f"\n  {where}: {words}" for where, words in matches[-20:])
            result.append(
                f"{rate:.1f} per 10,000 words, limit {pattern.limit:g}; "
                f"write: {pattern.instead}{examples}"
            )
    return result


def conditional_expressions(sources: Iterable[str]) -> float:
    """Return the number of conditional expressions per 1,000 lines."""
    count = lines = 0
    for source in sources:
        count += sum(isinstance(node, ast.IfExp) for node in ast.walk(ast.parse(source)))
        lines += len(source.splitlines())
    return 1e3 * count / max(lines, 1)


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _code(name: str) -> Iterator[Place]:
    if name == "native":
        for path in sorted((ROOT / "cpp").rglob("*")):
            if path.suffix in (".cpp", ".h", ".cuh", ".cu"):
                yield from cpp_comments(path.read_text(), _relative(path))
    for path in python_files(CODE[name]):
        yield from prose(path.read_text(), _relative(path))


@pytest.mark.parametrize("name", CODE)
def test_docstrings_and_comments_are_plain(name: str) -> None:
    assert not (messages := problems(_code(name))), "\n".join(messages)


def test_errors_and_help_are_plain() -> None:
    places = [
        place
        for path in python_files((*PRODUCT, *BENCHMARKS))
        for place in texts(path.read_text(), _relative(path))
    ]
    assert not (messages := problems(places)), "\n".join(messages)


def test_pages_are_plain() -> None:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    places = [place for path in paths for place in page(path.read_text(), _relative(path))]
    assert not (messages := problems(places)), "\n".join(messages)


@pytest.mark.parametrize("name", CONDITIONAL_EXPRESSIONS)
def test_conditional_expressions_are_few(name: str) -> None:
    rate = conditional_expressions(path.read_text() for path in python_files(CODE[name]))
    assert rate <= CONDITIONAL_EXPRESSIONS[name]


PLANTED = {
    "docstring": (prose, 'def f():\n    """Return what it lies beside."""\n', "a.py:2"),
    "comment": (prose, "x = 1  # what it lies beside\n", "a.py:1"),
    "error": (texts, 'raise ValueError("that is what it lies beside")\n', "a.py:1"),
    "part of an f-string": (texts, 'f"{x} is what it lies beside"\n', "a.py:1"),
    "page": (page, "```\ncode\n```\nThis is what it lies beside.\n", "a.py:4"),
    "C++ comment": (cpp_comments, "int x;  // what it lies beside\n", "a.py:1"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_dialect_is_reported(name: str) -> None:
    read, source, where = PLANTED[name]
    messages = problems(read(source, "a.py"))
    assert [text.splitlines()[-1] for text in messages] == [
        f"  {where}: {words}" for words in ("what it", "beside", "lies")
    ]


def test_plain_sentences_and_code_are_not_reported() -> None:
    plain = 'def f(found):\n    """Return the layout of the tensor."""\n    return "kept"\n'
    assert list(texts(plain, "a.py")) == []
    assert problems(prose(plain, "a.py")) == []
    assert problems(page("```\nwhat it lies beside\n```\n", "a.md")) == []


def test_planted_conditional_expressions_are_counted() -> None:
    assert conditional_expressions(["x = 1 if y else 2\n"]) == 1000
    assert conditional_expressions(["if y:\n    x = 1\n"]) == 0
