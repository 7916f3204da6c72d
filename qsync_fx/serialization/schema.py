"""Schema of a kind of file: its name in errors, version, limits and dataclass.

Invariant: for any bytes, reading ends within bounded memory and time with a valid value, or with an
error of the schema's class that names the problem, its position and a remedy. An unknown version is
an error before any other check. After a failed write, the file at the path is unchanged. TOML files
are read as strictly as JSON files, but have no version, because people write them by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Generic, TypeVar

from cattrs import Converter

from qsync_fx.errors import QSyncError, nearest, shown
from qsync_fx.serialization.atomic_files import check_writable, write_text
from qsync_fx.serialization.convert import Check, converter, structured
from qsync_fx.serialization.strict_json import (
    Malformed,
    Number,
    Parsed,
    decoded,
    kind,
    parse as parse_json,
    written_twice,
)

T = TypeVar("T")
V = TypeVar("V")
Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Schema(Generic[T]):
    """Kind of JSON file.

    Attributes:
        holds: dataclass of the file's fields.
        noun: name in errors, such as "plan".
        error: class of its errors.
        remedy: default advice for an invalid file.
        name: value of the field "format"; None for a file whose field "format" is the version.
        version: version that is written and read.
        largest: size limit of a file in bytes.
        smaller: advice to make a file smaller.
        checks: by class, a function that returns why a value is invalid, or None.
    """

    holds: type[T]
    noun: str
    error: type[QSyncError]
    remedy: str
    name: str | None
    version: int = 1
    largest: int = 8 * 2**20
    smaller: str = "store less data in one file"
    checks: Mapping[Any, Check] = field(default_factory=dict)

    def plain(self, value: T) -> dict[str, Any]:
        """Return a value as an object for `json`, header included."""
        return {**self._head, **self.part(value)}

    def part(self, value: object) -> Any:
        """Return a value that is part of such files as an object for `json`."""
        return self._converter.unstructure(value)

    def encode(self, value: T) -> str:
        """Return the text of a file."""
        return json.dumps(self.plain(value), indent=1, allow_nan=False) + "\n"

    def decode(self, text: str | bytes | Parsed) -> T:
        """Return the value of a text; raise `error` for an invalid text."""
        return self._complaining(self._decoded, text)

    def parsed(self, text: str | bytes) -> Parsed:
        """Return the parsed text of any kind of file for `decode`; raise `error` if not JSON."""
        return self._complaining(lambda text: Parsed(parse_json(text)), text)

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file; raise `error` if it is missing or unreadable."""
        name = self._name(path)
        try:
            with open(name, "rb", opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    message = f"the path of the {self.noun} is not a regular file"
                    raise self.error(
                        message, where=shown(name), do="use the path of a regular file"
                    )
                return file.read(self.largest + 1)
        # ValueError: the path has a null character, or the file system cannot encode it.
        except (OSError, ValueError) as error:
            raise self.error(
                f"the {self.noun} cannot be read: {getattr(error, 'strerror', None) or error}",
                where=shown(name),
                do="check the path and its permissions",
            ) from error

    def load(self, path: Path) -> T:
        """Return the value of a file; raise `error` with problem and position if it is invalid."""
        data = self.read(path)
        try:
            return self.decode(data)
        except self.error as error:
            raise self.within(path, error) from None

    def resumed(self, path: Path, empty: T, differs: Callable[[T], str | None]) -> T:
        """Return the value that an interrupted run left at `path`; `empty` without a file.

        Args:
            path: path of the file.
            empty: initial value of a run.
            differs: returns how a file differs from this run; None if it belongs to this run.

        Raises `error` for an invalid file, or for one of another run.
        """
        if not pathlib.Path(path).exists():
            return empty
        result = self.load(path)
        if (message := differs(result)) is not None:
            raise self.error(
                f"the {self.noun} in the file does not belong to this run: {message}",
                where=str(path),
                do=self.remedy,
            )
        return result

    def within(self, path: Path, error: QSyncError) -> QSyncError:
        """Return an error about a text as an error about the file at `path`."""
        where = ", ".join(filter(None, (shown(str(path)), error.where)))
        return self.error(error.what, where=where, do=error.do)

    def write(self, path: Path, text: str) -> None:
        """Replace the file at `path` atomically; on failure raise `error` and leave it unchanged.

        A link stays, and the file that it points to is replaced.
        """
        name = self._name(path)
        if len(text.encode()) > self.largest:
            raise self.error(
                f"the {self.noun} is larger than {self.largest} bytes",
                where=shown(name),
                do=self.smaller,
            )
        with self._saving(name):
            write_text(pathlib.Path(name), text)

    def check_writable(self, path: Path) -> None:
        """Raise `error` if `write` would fail for any text, before the text is computed."""
        name = self._name(path)
        with self._saving(name):
            check_writable(name)

    @contextlib.contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        try:
            yield
        except (QSyncError, ValueError) as error:
            if isinstance(error, self.error):
                raise
            subject, do = (
                (error.what, error.do)
                if isinstance(error, QSyncError)
                else (str(error), "use another path")
            )
            raise self.error(
                f"the {self.noun} cannot be saved: {subject}", where=shown(name), do=do
            ) from error

    def is_named_in(self, text: Parsed) -> bool:
        """Return whether a text claims to be such a file, valid or not."""
        tree = text.tree
        return self.name is not None and isinstance(tree, dict) and tree.get("format") == self.name

    @cached_property
    def _head(self) -> dict[str, object]:
        return (
            {"format": self.version}
            if self.name is None
            else {"format": self.name, "version": self.version}
        )

    @cached_property
    def _converter(self) -> Converter:
        return converter(self.checks)

    def _name(self, path: Path) -> str:
        try:
            name = os.fspath(path)
        except TypeError:
            name = None
        if not isinstance(name, str):
            message = f"the path of a {self.noun} must be a string or path, not {kind(path)}"
            raise self.error(message, do=f'use a path such as "{self.noun.split()[-1]}.json"')
        return name

    def _complaining(self, read: Callable[[Any], V], text: str | bytes | Parsed) -> V:
        """Return the result of `read`; convert `Malformed` to `error`."""
        try:
            if not isinstance(text, str | bytes | Parsed):
                raise Malformed(
                    f"a {self.noun} is decoded from text, not from {kind(text)}",
                    do="pass text, or load a file",
                )
            if not isinstance(text, Parsed) and len(text) > self.largest:
                raise Malformed(f" is larger than {self.largest} bytes", do=self.smaller)
            return read(text)
        except Malformed as wrong:
            message = f"the {self.noun}{wrong.what}" if wrong.what.startswith(" ") else wrong.what
            raise self.error(
                message, where=wrong.where or None, do=wrong.do or self.remedy
            ) from None

    def _decoded(self, text: str | bytes | Parsed) -> T:
        tree = text.tree if isinstance(text, Parsed) else parse_json(text)
        if not isinstance(tree, dict):
            raise Malformed(f"the {self.noun} must be a JSON object, not {kind(tree)}")
        self._check_head(tree)
        body = {key: value for key, value in tree.items() if key not in self._head}
        available = [field.name for field in fields(self.holds)]  # type: ignore[arg-type]
        if (unknown := next((key for key in body if key not in available), None)) is not None:
            raise Malformed(
                f"the {self.noun} has an unknown field {shown(unknown)}",
                do=nearest(unknown[:40], available),
            )
        if (wrong := written_twice(tree)) is not None:
            raise wrong
        result: T = structured(self._converter, body, self.holds)
        return result

    def _check_head(self, tree: Mapping[str, object]) -> None:
        if self.name is not None and tree.get("format") != self.name:
            message = f"the JSON is not marked as a {self.noun}"
            head = f'a {self.noun} has "format": "{self.name}" and "version": {self.version}'
            raise Malformed(message, "format", f"{head}; {self.remedy}")
        key = list(self._head)[-1]
        inputs = tree.get(key)
        number = (
            int(inputs.text)
            if isinstance(inputs, Number) and inputs.text.isdecimal() and len(inputs.text) < 10
            else 0
        )
        if number > self.version:
            message = f" has version {number}, but this qsync_fx reads version {self.version}"
            raise Malformed(
                message, key, f"upgrade qsync_fx, or save the {self.noun} with this version"
            )
        if number != self.version:
            result = kind(inputs) if key in tree else "missing"
            raise Malformed(
                f"the {self.noun}'s {key} is {result}", key, f'write "{key}": {self.version}'
            )


def _open_at_once(name: str, flags: int) -> int:
    # `open` would block on a pipe without a writer; the caller checks the file type.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


class TomlSchema(Schema[T]):
    """Kind of TOML file; read only."""

    def _decoded(self, text: str | bytes | Parsed) -> T:
        tree = text.tree if isinstance(text, Parsed) else parse(text)
        result: T = structured(self._converter, tree, self.holds)
        return result


def parse(text: str | bytes) -> object:
    """Return the tree of a text; raise `Malformed` if it is not TOML."""
    text = decoded(text)
    try:
        # Windows ends lines with two characters, which tomllib accepts in files but not in text.
        return _numbers(tomllib.loads(text.replace("\r\n", "\n"), parse_float=Number))
    except tomllib.TOMLDecodeError as error:
        subject, _, where = str(error).rpartition(" (at ")
        raise Malformed(
            f" is not valid TOML: {subject or error}",
            where.rstrip(")"),
            "correct the syntax at this position",
        ) from None
    except ValueError as error:  # an integer with thousands of digits
        raise Malformed(f" is not valid TOML: {error}") from None
    except RecursionError:
        raise Malformed(" is nested too deeply") from None


def _numbers(tree: Any) -> Any:
    """Return the tree with numbers as `Number`, like a JSON tree."""
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
