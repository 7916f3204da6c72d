"""Strict parser for untrusted JSON text.

Invariant: for any bytes, parsing ends within bounded memory and time with a tree of objects, lists,
text, numbers, true, false and null, or with a `Malformed` that names the position. An object
records a repeated key.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from qsync_fx.errors import shown


class Malformed(ValueError):
    """Error in a text or in its tree.

    Attributes:
        what: the problem; if it begins with a space, the name of the file's kind precedes it.
        where: position: line and column, or a path such as `choices[0].problem`; "" for the whole
            text.
        do: remedy; "" without a specific one.
    """

    def __init__(self, description: str, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = description, where, do
        super().__init__(description, where, do)

    def __str__(self) -> str:
        return f"{self.where}: {self.what.strip()}" if self.where else self.what.strip()


class Object(dict[str, object]):
    """JSON object that records a repeated key."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.twice: str | None = None
        if len(self) < len(pairs):
            ((self.twice, _),) = Counter(key for key, _ in pairs).most_common(1)


@dataclass(frozen=True)
class Parsed:
    """Parsed text, whose kind of file can be tested before it is decoded."""

    tree: object


def kind(value: object) -> str:
    """Return a description of a value for error messages, in the terms of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {str(value)[:40]}"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
    return f"a value of type {type(value).__name__}"


def shown_value(value: object) -> str:
    """Return a text in quotes, and the `kind` of any other value."""
    return shown(value) if isinstance(value, str) else kind(value)


def parse(text: str | bytes) -> object:
    """Return the tree of a text; raise `Malformed` if it is not JSON."""
    text = decoded(text)
    try:
        return json.loads(text, object_pairs_hook=Object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        do = "get a complete copy of the file"
        if not text.strip():
            raise Malformed(" is empty", where, do) from None
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise Malformed(" is truncated", where, do) from None
        raise Malformed("not valid JSON", where, "correct the syntax at this position") from None
    except ValueError as error:  # an integer with thousands of digits
        raise Malformed(f" is not valid JSON: {error}") from None
    except RecursionError:
        raise Malformed(" is nested too deeply") from None


def decoded(text: str | bytes) -> str:
    """Return the text of UTF-8 bytes; raise `Malformed` for other bytes."""
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        do = "save the file as UTF-8, or get an intact copy"
        raise Malformed(" is not valid UTF-8", f"byte {error.start}", do) from None


def check_repeated_keys(tree: object) -> None:
    """Raise `Malformed` for an object with a repeated key."""
    todo: list[tuple[str, object]] = [("", tree)]
    while todo:
        where, value = todo.pop()
        if isinstance(value, Object):
            if value.twice is not None:
                message = f"the key {shown(value.twice)} occurs twice"
                raise Malformed(message, where.removeprefix("."), "remove one of them")
            todo += [(where + step(key), part) for key, part in value.items()]
        elif isinstance(value, list):
            todo += [(where + step(index), part) for index, part in enumerate(value)]


def step(key: str | int) -> str:
    """Return the path element of a key or index: `.name`, `["a key"]`, `[3]`."""
    if isinstance(key, int):
        return f"[{key}]"
    if key.isidentifier() and len(key) <= 40:
        return f".{key}"
    return f"[{json.dumps(key[:120])}]"
