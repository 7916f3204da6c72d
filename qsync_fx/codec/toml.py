"""Files of TOML that people write, read as strictly as those of JSON.

Invariant: that of `schema`, but for the head: what people write by hand says no version, and its fields are all there is.
"""

from __future__ import annotations

import tomllib
from typing import Any, TypeVar

from qsync_fx.codec.schema import Schema
from qsync_fx.codec.structure import structured
from qsync_fx.codec.text import Malformed, Number, Parsed, decoded

T = TypeVar("T")


class TomlSchema(Schema[T]):
    """A kind of file that is TOML; such files are read and never written."""

    def _decoded(self, text: str | bytes | Parsed) -> T:
        tree = text.tree if isinstance(text, Parsed) else parse(text)
        found: T = structured(self._converter, tree, self.holds)
        return found


def parse(text: str | bytes) -> object:
    """Returns the tree of a text; raises `Malformed` for anything that is not TOML."""
    text = decoded(text)
    try:
        # Windows ends lines with two characters, which tomllib takes in files but not in text.
        return _numbers(tomllib.loads(text.replace("\r\n", "\n"), parse_float=Number))
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rpartition(" (at ")
        raise Malformed(f" is not TOML: {what or error}", where.rstrip(")"), "correct it there") from None
    except ValueError as error:  # a number of thousands of digits
        raise Malformed(f" is not TOML: {error}") from None
    except RecursionError:
        raise Malformed(" is nested too deeply") from None


def _numbers(tree: Any) -> Any:
    """Returns the tree with numbers as written, as that of JSON has them."""
    match tree:
        case bool():
            return tree
        case int():
            return Number(str(tree))
        case dict():
            return {key: _numbers(part) for key, part in tree.items()}
        case list():
            return [_numbers(part) for part in tree]
        case _:
            return tree
