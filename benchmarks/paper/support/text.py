"""Real text that ships with packages: what functions and classes of five of them are described as, and from which package it is.

The first paragraph of each docstring, in lower case, without what is no word, and without the packages' own names. English prose about
programming, by many authors; a task like telling topics apart.

Invariant: the same installed versions give the same texts in the same order; training and test texts have none in common.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = {
    "torch": "torch",
    "sympy": "sympy",
    "networkx": "networkx",
    "sklearn": "scikit-learn",
    "transformers": "transformers",
}
"""What is imported, and what it is installed as."""
NAMES = (*PACKAGES, "scikit", "huggingface")
"""What words that have it in them are left out for: they tell the package."""
FILES, FEW = 600, 30
"""Of a package, drawn from all, that are looked through: it takes seconds, and thousands of them would take a minute. Few are enough where
nothing is measured."""
LENGTH, WORDS, LEAST = 32, 3000, 6
PADDING, UNKNOWN, FIRST, MASK = range(4)
SPECIAL = 4

Text = tuple[str, ...]
"""Its words."""


@dataclass(frozen=True)
class Texts:
    """Rows of the numbers of words, and the package of each.

    Attributes:
        name: what they are, for reports.
        train, test: numbers of words, int64 of shape (texts, LENGTH), and labels.
        words: how many different ones there are.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    words: int


def load(each: int, files: int = FILES) -> Texts:
    """Returns the texts, so many of a package and from so many of its files at most; a fifth of them to test with."""
    of = {package: set(_all(package, files)) for package in PACKAGES}
    told = Counter(text for texts in of.values() for text in texts)
    found = [
        (text, label)
        for label, texts in enumerate(of.values())
        for text in _drawn(sorted(text for text in texts if told[text] == 1), each)
    ]
    random.Random(0).shuffle(found)
    cut = len(found) // 5
    test, train = found[:cut], found[cut:]
    counts = Counter(word for text, _ in train for word in text)
    known = {word: SPECIAL + at for at, (word, _) in enumerate(counts.most_common(WORDS - SPECIAL))}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values())
    name = f"{len(train)} and {len(test)} descriptions from {versions}"
    return Texts(name, _numbers(train, known), _numbers(test, known), SPECIAL + len(known))


def _drawn(texts: Sequence[Text], count: int) -> list[Text]:
    return random.Random(0).sample(texts, min(count, len(texts)))


def _all(package: str, count: int) -> Iterator[Text]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    files = [
        path for path in sorted(Path(spec.origin).parent.rglob("*.py")) if "tests" not in path.parts
    ]
    for path in random.Random(0).sample(files, min(count, len(files))):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                words = _words((ast.get_docstring(node) or "").split("\n\n")[0])
                if len(words) >= LEAST:
                    yield words


def _words(text: str) -> Text:
    found = (
        word
        for word in re.findall(r"[a-z]+", text.lower())
        if not any(name in word for name in NAMES)
    )
    return tuple(found)[: LENGTH - 1]


def _numbers(texts: Sequence[tuple[Text, int]], known: dict[str, int]) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(texts), LENGTH), PADDING)
    for row, (text, _) in zip(rows, texts, strict=True):
        numbers = [FIRST, *(known.get(word, UNKNOWN) for word in text)]
        row[: len(numbers)] = torch.tensor(numbers)
    return rows, torch.tensor([label for _, label in texts])
