"""JSON text that anyone may have written, read to the letter.

Invariant: whatever the bytes, reading ends within bounded memory and time in a tree of objects, lists, text, numbers, true, false and null,
or in a `Malformed` that says where the text is wrong. No number is converted, so 10**9999 costs nothing, and an object remembers a key that
was written twice.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from qsync_fx.errors import shown


class Malformed(ValueError):
    """What is wrong with a text, or with the tree that it makes.

    Attributes:
        what: what is wrong; where it begins with a space, the name of the file's kind comes before it.
        where: the place: a line and column, or a path such as `choices[0].problem`; "" for the whole.
        do: what helps; "" where nothing special does.
    """

    def __init__(self, description: str, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = description, where, do
        super().__init__(description, where, do)

    def __str__(self) -> str:
        return f"{self.where}: {self.what.strip()}" if self.where else self.what.strip()


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written, NaN and Infinity among them."""

    text: str


class Object(dict[str, object]):
    """A JSON object that remembers a key that was written twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        repeated = (key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        self.twice = None if len(self) == len(pairs) else next(repeated)


@dataclass(frozen=True)
class Parsed:
    """A text that has been parsed: what kind of file it is can be asked before it is read as one."""

    tree: object


# Numbers that occur again share one object: text of "1,1,1" takes no more memory than its list.
_number: Final = functools.lru_cache(maxsize=4096)(Number)


def kind(value: object) -> str:
    """Returns what a value is, in the words of JSON where it has them, for error messages."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Number(text):
            return f"the number {text}" if len(text) <= 40 else f"a number of {len(text)} digits"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return f"a value of type {type(value).__name__}"


def parse(text: str | bytes) -> object:
    """Returns the tree of a text; raises `Malformed` for anything that is not JSON."""
    text = decoded(text)
    try:
        return json.loads(
            text,
            object_pairs_hook=Object,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_number,
        )
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        message = (
            " ends in the middle" if cut and text.strip() else " is empty" if cut else "not JSON"
        )
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise Malformed(message, where, "get a whole copy" if cut else "correct it there") from None
    except RecursionError:
        raise Malformed(" is nested too deeply") from None


def decoded(text: str | bytes) -> str:
    """Returns a text; raises `Malformed` for bytes that are none."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        raise Malformed(
            " is not UTF-8", where, "save the file as UTF-8, or get an intact copy"
        ) from None


def written_twice(tree: object) -> Malformed | None:
    """Returns the complaint about the first object with a key that was written twice; None where there is none."""
    todo: list[tuple[str, object]] = [("", tree)]
    while todo:
        where, value = todo.pop()
        if isinstance(value, Object):
            if value.twice is not None:
                return Malformed(
                    f"the key {shown(value.twice)} is written twice",
                    where.removeprefix("."),
                    "keep one of them",
                )
            todo += [(where + step(key), part) for key, part in value.items()]
        elif isinstance(value, list):
            todo += [(where + step(index), part) for index, part in enumerate(value)]
    return None


def step(key: str | int) -> str:
    """Returns how the path to a part goes on from its whole: `.name`, `["a key"]`, `[3]`."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() and len(key) <= 40 else f"[{json.dumps(key[:120])}]"
