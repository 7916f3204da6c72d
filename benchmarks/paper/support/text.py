"""Text data set of docstrings from five installed packages, labeled with the package.

A text is the first paragraph of a function's or class's docstring, in lower case, letters only,
without words that contain a package name. It is English prose by many authors; the task resembles
topic classification.

Invariant: the same installed versions give the same texts in the same order; training and test
texts are disjoint.
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
"""Import name to distribution name."""
NAMES = (*PACKAGES, "scikit", "huggingface")
"""A word that contains one of these names is dropped, because it reveals the label."""
FILES, FEW = 600, 30
"""Number of files to sample per package, normally and in quick runs.

Parsing `FILES` takes seconds; all files would take a minute.
"""
LENGTH, WORDS, LEAST = 32, 3000, 6
PADDING, UNKNOWN, FIRST, MASK = range(4)
SPECIAL = 4

Text = tuple[str, ...]
"""Words of a text."""


@dataclass(frozen=True)
class Texts:
    """Encoded texts with their labels.

    Attributes:
        name: description for reports.
        train, test: word indices, int64 of shape (texts, LENGTH), and labels, int64 of shape
            (texts,).
        words: size of the vocabulary.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    words: int


def load(each: int, files: int = FILES) -> Texts:
    """Return up to `each` texts per package from up to `files` files; a fifth are test texts."""
    of = {package: set(_all(package, files)) for package in PACKAGES}
    counted = Counter(text for texts in of.values() for text in texts)
    texts_of_word = [
        (text, label)
        for label, texts in enumerate(of.values())
        for text in _drawn(sorted(text for text in texts if counted[text] == 1), each)
    ]
    random.Random(0).shuffle(texts_of_word)
    cut = len(texts_of_word) // 5
    test, train = texts_of_word[:cut], texts_of_word[cut:]
    counts = Counter(word for text, _ in train for word in text)
    numbers = {
        word: SPECIAL + index for index, (word, _) in enumerate(counts.most_common(WORDS - SPECIAL))
    }
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values())
    name = f"{len(train)} and {len(test)} descriptions from {versions}"
    return Texts(name, _numbers(train, numbers), _numbers(test, numbers), SPECIAL + len(numbers))


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
    words = (
        word
        for word in re.findall(r"[a-z]+", text.lower())
        if not any(name in word for name in NAMES)
    )
    return tuple(words)[: LENGTH - 1]


def _numbers(texts: Sequence[tuple[Text, int]], number_of: dict[str, int]) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(texts), LENGTH), PADDING)
    for row, (text, _) in zip(rows, texts, strict=True):
        numbers = [FIRST, *(number_of.get(word, UNKNOWN) for word in text)]
        row[: len(numbers)] = torch.tensor(numbers)
    return rows, torch.tensor([label for _, label in texts])
