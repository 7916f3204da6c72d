"""Schema of a kind of file: its name in errors, version, limits and dataclass.

Invariant: for any bytes, reading ends within bounded memory and time with a valid value, or with an
error of the schema's class that names the problem, its position and a remedy. An unknown version is
an error before any other check. TOML files are read as strictly, but have no version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from types import UnionType
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from cattrs import Converter
from cattrs.gen import make_dict_unstructure_fn

from qsync_fx.errors import QSyncError, nearest, shown
from qsync_fx.serialization.atomic_files import check_writable, write_text
from qsync_fx.serialization.strict_json import (
    Malformed,
    Parsed,
    check_repeated_keys,
    decoded,
    kind,
    parse as parse_json,
    step,
)

Check = Callable[[Any], str | None]
_Reader = Callable[[Any], Any]
_WORDS: Final = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def reader(expected: Any, checks: Mapping[Any, Check] | None = None) -> _Reader:
    """Return a function from a parsed tree to a value of type `expected`; it raises `Malformed`.

    `checks` are by the class of a value.
    """
    read = _reader(expected, checks or {})

    def result(tree: object) -> Any:
        try:
            return read(tree)
        except Malformed as wrong:
            wrong.where = wrong.where.removeprefix(".")
            raise

    return result


def _reader(expected: Any, checks: Mapping[Any, Check]) -> _Reader:
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Any:
        return lambda value: value
    if expected in _WORDS:
        return functools.partial(_leaf, expected)
    if origin is Literal:
        return functools.partial(_literal, arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        several = functools.partial(_list, _reader(arguments[0], checks))
        return lambda value: tuple(several(value))
    if origin is tuple:
        return functools.partial(_tuple, [_reader(part, checks) for part in arguments])
    if origin in (list, Sequence):
        return functools.partial(_list, _reader(arguments[0], checks))
    if origin in (dict, Mapping):
        assert arguments[0] is str, "the keys of a JSON object are text"
        return functools.partial(_mapping, _reader(arguments[1], checks))
    if origin in (Union, UnionType):
        return _union(arguments, checks)
    return _class(expected, checks)


def _leaf(expected: type, value: object) -> Any:
    if expected is float and isinstance(value, int | float) and type(value) is not bool:
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is expected:
        return value
    raise _not(value, _WORDS[expected])


def _literal(values: tuple[object, ...], value: object) -> Any:
    for available in values:
        with contextlib.suppress(Malformed):
            if _leaf(type(available), value) == available:
                return available
    raise _not(value, " or ".join(map(repr, values)))


def _tuple(parts: Sequence[_Reader], value: object) -> Any:
    if not isinstance(value, list) or len(value) != len(parts):
        raise _not(value, f"a list of {len(parts)}")
    pairs = zip(parts, value, strict=True)
    return tuple(_at(index, *pair) for index, pair in enumerate(pairs))


def _list(part: _Reader, value: object) -> Any:
    if not isinstance(value, list):
        raise _not(value, "a list")
    return [_at(index, part, element) for index, element in enumerate(value)]


def _mapping(part: _Reader, value: object) -> Any:
    if not isinstance(value, Mapping):
        raise _not(value, "an object")
    return {key: _at(key, part, element) for key, element in value.items()}


def _class(expected: Any, checks: Mapping[Any, Check]) -> _Reader:
    hints = get_type_hints(expected)
    readers = {part.name: _reader(hints[part.name], checks) for part in fields(expected)}
    needed = [
        f.name for f in fields(expected) if f.default is MISSING and f.default_factory is MISSING
    ]
    check = checks.get(expected)

    def read(value: object) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        for key in value:
            if key not in readers:
                message = f" has an unknown field {shown(key)}"
                do = getattr(expected, "replaced_fields", {}).get(key)
                raise Malformed(message, do=do or nearest(key[:40], readers))
        for name in needed:
            if name not in value:
                raise Malformed(f" lacks the field {name!r}")
        made = expected(**{key: _at(key, readers[key], part) for key, part in value.items()})
        if check is not None and (why := check(made)):
            raise Malformed(why)
        return made

    return read


def _union(members: tuple[Any, ...], checks: Mapping[Any, Check]) -> _Reader:
    """Return the reader of a union of leaves, of one type and None, or of dataclasses by kind."""
    plain = [member for member in members if member is not type(None)]
    readers = [_reader(member, checks) for member in plain]
    kinds = {getattr(member, "kind", ""): part for member, part in zip(plain, readers, strict=True)}

    def read(value: object) -> Any:
        if value is None and len(plain) < len(members):
            return None
        if len(readers) == 1:
            return readers[0](value)
        for part in readers:
            with contextlib.suppress(Malformed):
                return part(value)
        raise _not(value, " or ".join(_WORDS[member] for member in plain))

    def read_by_kind(value: object) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        reported = value.get("kind")
        if not isinstance(reported, str) or reported not in kinds:
            wanted = " or ".join(map(repr, kinds))
            raise Malformed(f" has {kind(reported)} instead of {wanted}", step("kind"))
        return kinds[reported]({key: part for key, part in value.items() if key != "kind"})

    by_kind = "" not in kinds and len(plain) == len(members)
    return read_by_kind if by_kind else read


def _at(key: str | int, read: _Reader, value: object) -> Any:
    try:
        return read(value)
    except Malformed as wrong:
        wrong.where = step(key) + wrong.where
        raise


def _not(value: object, wanted: str) -> Malformed:
    return Malformed(f" has {kind(value)} instead of {wanted}")


_converter: Final = Converter(unstruct_collection_overrides={tuple: list})


def _has_kind(expected: Any) -> bool:
    return is_dataclass(expected) and hasattr(expected, "kind")


def _with_kind(cls: Any) -> Callable[[Any], dict[str, Any]]:
    inner = make_dict_unstructure_fn(cls, _converter)
    return lambda value: {"kind": cls.kind, **inner(value)}


_converter.register_unstructure_hook_factory(_has_kind, _with_kind)


def unstructured(value: object) -> Any:
    """Return a value of a dataclass as an object for `json`, which `reader` reads."""
    return _converter.unstructure(value)


T = TypeVar("T")
Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Schema(Generic[T]):
    """Kind of JSON file.

    Attributes:
        content: dataclass of the file's fields.
        noun: name in errors, such as "plan".
        remedy: default advice for an invalid file.
        name: value of the field "format"; None for a file whose field "format" is the version.
        version: version that is written and read.
        largest: size limit of a file in bytes.
        smaller: advice to make a file smaller.
        checks: by class, a function that returns why a value is invalid, or None.
    """

    content: type[T]
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
        return {**self._head, **unstructured(value)}

    def encode(self, value: T) -> str:
        """Return the text of a file."""
        return json.dumps(self.plain(value), indent=1, allow_nan=False) + "\n"

    def decode(self, text: str | bytes | Parsed) -> T:
        """Return the value of a text; raise `error` for an invalid text."""
        with self._complaining():
            return self._value(self.parsed(text).tree)

    def parsed(self, text: str | bytes | Parsed) -> Parsed:
        """Return the parsed text of any kind of file for `decode`; raise `error` if not JSON."""
        with self._complaining():
            if isinstance(text, Parsed):
                return text
            if not isinstance(text, str | bytes):
                raise Malformed(
                    f"a {self.noun} is decoded from text, not from {kind(text)}",
                    do="pass text, or load a file",
                )
            if len(text) > self.largest:
                raise Malformed(f" is larger than {self.largest} bytes", do=self.smaller)
            return Parsed(self._parse(text))

    def read(self, path: Path) -> bytes:
        """Return the bytes of a file; raise `error` if it is missing or unreadable."""
        name = self._name(path)
        try:
            # Without this flag, `open` would block on a pipe without a writer.
            flag = getattr(os, "O_NONBLOCK", 0)
            with open(name, "rb", opener=lambda name, flags: os.open(name, flags | flag)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    message = f"the path of the {self.noun} is not a regular file"
                    do = "use the path of a regular file"
                    raise self.error(message, where=shown(name), do=do)
                return file.read(self.largest + 1)
        # ValueError: the path has a null character, or the file system cannot encode it.
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            message, do = f"the {self.noun} cannot be read: {reason}", "check the path"
            raise self.error(message, where=shown(name), do=f"{do} and its permissions") from error

    def load(self, path: Path) -> T:
        """Return the value of a file; raise `error` with problem and position if it is invalid."""
        data = self.read(path)
        try:
            return self.decode(data)
        except self.error as error:
            raise self.within(path, error) from None

    def resumed(self, path: Path, empty: T, differs: Callable[[T], str | None]) -> T:
        """Return the value that an interrupted run left at `path`; `empty` without a file.

        `differs` returns how a file differs from this run; None if it belongs to this run. Raise
        `error` for an invalid file, or for one of another run.
        """
        if not pathlib.Path(path).exists():
            return empty
        result = self.load(path)
        if (why := differs(result)) is not None:
            message = f"the {self.noun} in the file does not belong to this run: {why}"
            raise self.error(message, where=str(path), do=self.remedy)
        return result

    def within(self, path: Path, error: QSyncError) -> QSyncError:
        """Return an error about a text as an error about the file at `path`."""
        where = ", ".join(filter(None, (shown(str(path)), error.where)))
        return self.error(error.what, where=where, do=error.do)

    def write(self, path: Path, text: str) -> None:
        """Replace the file at `path` atomically; on failure raise `error`, leave it unchanged."""
        name = self._name(path)
        if len(text.encode()) > self.largest:
            message = f"the {self.noun} is larger than {self.largest} bytes"
            raise self.error(message, where=shown(name), do=self.smaller)
        with self._saving(name):
            write_text(pathlib.Path(name), text)

    def check_writable(self, path: Path) -> None:
        """Raise `error` if `write` would fail for any text, before the text is computed."""
        with self._saving(name := self._name(path)):
            check_writable(name)

    @contextlib.contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        try:
            yield
        except (QSyncError, ValueError) as error:
            message = f"the {self.noun} cannot be saved: {getattr(error, 'what', error)}"
            do = getattr(error, "do", "use another path")
            raise self.error(message, where=shown(name), do=do) from error

    def is_named_in(self, text: Parsed) -> bool:
        """Return whether a text claims to be such a file, valid or not."""
        tree = text.tree
        return self.name is not None and isinstance(tree, dict) and tree.get("format") == self.name

    @cached_property
    def _head(self) -> dict[str, object]:
        if self.name is None:
            return {"format": self.version}
        return {"format": self.name, "version": self.version}

    @cached_property
    def _reader(self) -> _Reader:
        return reader(self.content, self.checks)

    def _name(self, path: Path) -> str:
        try:
            name = os.fspath(path)
        except TypeError:
            name = None
        if isinstance(name, str):
            return name
        message = f"the path of a {self.noun} must be a string or path, not {kind(path)}"
        raise self.error(message, do=f'use a path such as "{self.noun.split()[-1]}.json"')

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        """Convert `Malformed` to `error`."""
        try:
            yield
        except Malformed as wrong:
            message = wrong.what
            if message.startswith(" "):
                message = f"the {self.noun}{message}"
            do = wrong.do or self.remedy
            raise self.error(message, where=wrong.where or None, do=do) from None

    def _parse(self, text: str | bytes) -> object:
        return parse_json(text)

    def _value(self, tree: object) -> T:
        if not isinstance(tree, dict):
            raise Malformed(f"the {self.noun} must be a JSON object, not {kind(tree)}")
        self._check_head(tree)
        body = {key: value for key, value in tree.items() if key not in self._head}
        available = [field.name for field in fields(self.content)]  # type: ignore[arg-type]
        for key in body:
            if key not in available:
                message = f"the {self.noun} has an unknown field {shown(key)}"
                raise Malformed(message, do=nearest(key[:40], available))
        check_repeated_keys(tree)
        result: T = self._reader(body)
        return result

    def _check_head(self, tree: Mapping[str, object]) -> None:
        if self.name is not None and tree.get("format") != self.name:
            message = f"the JSON is not marked as a {self.noun}"
            head = f'a {self.noun} has "format": "{self.name}" and "version": {self.version}'
            raise Malformed(message, "format", f"{head}; {self.remedy}")
        key = list(self._head)[-1]
        version = tree.get(key)
        number = version if type(version) is int else 0
        actual = kind(version) if key in tree else "missing"
        message, do = f"the {self.noun}'s {key} is {actual}", f'write "{key}": {self.version}'
        if number > self.version:
            message = f" has version {number}, but this qsync_fx reads version {self.version}"
            do = f"upgrade qsync_fx, or save the {self.noun} with this version"
        if number != self.version:
            raise Malformed(message, key, do)


class TomlSchema(Schema[T]):
    """Kind of TOML file; read only."""

    def _parse(self, text: str | bytes) -> object:
        return parse_toml(text)

    def _value(self, tree: object) -> T:
        result: T = self._reader(tree)
        return result


def parse_toml(text: str | bytes) -> object:
    """Return the tree of a text; raise `Malformed` if it is not TOML."""
    text = decoded(text)
    try:
        # Windows ends lines with two characters, which tomllib accepts in files but not in text.
        return tomllib.loads(text.replace("\r\n", "\n"))
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
