"""Schema of a kind of file: its name in errors, version, limits and dataclass.

Invariant: for any bytes, reading ends within bounded memory and time with a valid value, or with an
error of the schema's class that names the problem, its position and a remedy. An unknown version is
an error before any other check. After a failed write, the file at the path is unchanged. TOML files
are read as strictly as JSON files, but have no version, because people write them by hand.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import stat
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
    Number,
    Parsed,
    decoded,
    kind,
    parse as parse_json,
    step,
    written_twice,
)

Check = Callable[[Any], str | None]
_Hook = Callable[[Any, Any], Any]
_LONGEST_NUMBER: Final = 40
_WORDS: Final = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def structured(by: Converter, tree: object, expected: Any) -> Any:
    """Return the value of type `expected` in a tree, or raise `Malformed`.

    Numbers may be `Number` or plain ones.
    """
    try:
        return by.structure(tree, expected)
    except Malformed as wrong:
        wrong.where = wrong.where.removeprefix(".")
        raise


def converter(checks: Mapping[Any, Check] | None = None) -> Converter:
    """Return a converter for dataclasses; `checks` are by the class of the values to check."""
    # Detailed validation would collect an error for each of a million wrong values.
    made = Converter(detailed_validation=False, unstruct_collection_overrides={tuple: list})
    for leaf, take in ((int, _whole), (float, _number), (str, _same), (bool, _same)):
        made.register_structure_hook(leaf, functools.partial(_leaf, take))
    factories: tuple[tuple[Callable[[Any], Any], Callable[[Converter, Any], _Hook]], ...] = (
        (functools.partial(_made_of, (Literal,)), _literal),
        (functools.partial(_made_of, (tuple,)), _tuple),
        (functools.partial(_made_of, (list, Sequence)), _list),
        (functools.partial(_made_of, (dict, Mapping)), _mapping),
        (is_dataclass, functools.partial(_class, checks or {})),
        (_kinds, _union),
        (_leaves, _one_of),
    )
    for condition, factory in factories:
        made.register_structure_hook_factory(condition, functools.partial(factory, made))
    made.register_unstructure_hook_factory(_has_kind, functools.partial(_with_kind, made))
    return made


def _made_of(origins: tuple[Any, ...], expected: Any) -> bool:
    return get_origin(expected) in origins


def _has_kind(expected: Any) -> bool:
    return is_dataclass(expected) and hasattr(expected, "kind")


def _leaf(take: Callable[[object], object], value: object, expected: type) -> Any:
    result = take(value)
    if type(result) is not expected:
        raise _not(value, _WORDS[expected])
    return result


def _same(value: object) -> object:
    return value


def _whole(value: object) -> object:
    """Return a number without a point or exponent as an integer, and other values unchanged."""
    if not isinstance(value, Number) or len(value.text) > _LONGEST_NUMBER:
        return value
    return int(value.text) if value.text.lstrip("-").isdecimal() else value


def _number(value: object) -> object:
    """Return a finite number as a float; None for other values."""
    if isinstance(value, Number) and len(value.text) <= _LONGEST_NUMBER:
        value = float(value.text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _literal(_: Converter, expected: Any) -> _Hook:
    values = get_args(expected)
    wanted = " or ".join(map(repr, values))

    def hook(value: object, _: Any) -> Any:
        result = _whole(value)
        for available in values:
            if type(result) is type(available) and result == available:
                return available
        raise _not(value, wanted)

    return hook


def _tuple(by: Converter, expected: Any) -> _Hook:
    parts = get_args(expected)
    if parts[1:] == (Ellipsis,):
        several = _list(by, list[parts[0]])  # type: ignore[valid-type]
        return lambda value, part: tuple(several(value, part))
    hooks = [by.get_structure_hook(part) for part in parts]

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(parts):
            raise _not(value, f"a list of {len(parts)}")
        return tuple(
            _at(index, *rest) for index, rest in enumerate(zip(hooks, value, parts, strict=True))
        )

    return hook


def _list(by: Converter, expected: Any) -> _Hook:
    (part,) = get_args(expected)
    inner = by.get_structure_hook(part)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, list):
            raise _not(value, "a list")
        return [_at(index, inner, element, part) for index, element in enumerate(value)]

    return hook


def _mapping(by: Converter, expected: Any) -> _Hook:
    key_type, part = get_args(expected)
    assert key_type is str, "the keys of a JSON object are text"
    inner = by.get_structure_hook(part)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        return {key: _at(key, inner, element, part) for key, element in value.items()}

    return hook


def _class(checks: Mapping[Any, Check], by: Converter, expected: Any) -> _Hook:
    check = checks.get(expected)
    hints = get_type_hints(expected)
    types = {field.name: hints[field.name] for field in fields(expected)}
    needed = [
        f.name for f in fields(expected) if f.default is MISSING and f.default_factory is MISSING
    ]
    hooks = {name: by.get_structure_hook(part) for name, part in types.items()}

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        for key in value:
            if key not in types:
                message = f" has an unknown field {shown(key)}"
                raise Malformed(message, do=nearest(key[:40], types))
        for name in needed:
            if name not in value:
                raise Malformed(f" lacks the field {name!r}")
        parts = {key: _at(key, hooks[key], part, types[key]) for key, part in value.items()}
        made = expected(**parts)
        if check is not None and (why := check(made)):
            raise Malformed(why)
        return made

    return hook


def _kinds(expected: Any) -> dict[str, Any]:
    """Return the classes of a union by their kind; empty for other types."""
    members = _members(expected)
    result = {member.kind: member for member in members if _has_kind(member)}
    return result if len(result) == len(members) else {}


def _members(expected: Any) -> tuple[Any, ...]:
    """Return the members of a union; empty for other types."""
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else ()


def _union(by: Converter, expected: Any) -> _Hook:
    kinds = _kinds(expected)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        reported = value.get("kind")
        if not isinstance(reported, str) or reported not in kinds:
            wanted = " or ".join(map(repr, kinds))
            raise Malformed(f" has {kind(reported)} instead of {wanted}", step("kind"))
        parts = {key: part for key, part in value.items() if key != "kind"}
        return by.structure(parts, kinds[reported])

    return hook


def _leaves(expected: Any) -> tuple[Any, ...]:
    """Return the members of a union of text and numbers; empty for other types.

    A single type, or one type or None, is not such a union.
    """
    plain = tuple(member for member in _members(expected) if member is not type(None))
    return plain if len(plain) > 1 and _WORDS.keys() >= {*plain} else ()


def _one_of(by: Converter, expected: Any) -> _Hook:
    leaves = _leaves(expected)
    hooks = [(by.get_structure_hook(leaf), leaf) for leaf in leaves]
    optional = type(None) in get_args(expected)

    def hook(value: object, _: Any) -> Any:
        if value is None and optional:
            return None
        for inner, leaf in hooks:
            with contextlib.suppress(Malformed):
                return inner(value, leaf)
        raise _not(value, " or ".join(_WORDS[leaf] for leaf in leaves))

    return hook


def _with_kind(by: Converter, cls: Any) -> Callable[[Any], dict[str, Any]]:
    inner = make_dict_unstructure_fn(cls, by)
    return lambda value: {"kind": cls.kind, **inner(value)}


def _at(key: str | int, hook: _Hook, value: object, expected: Any) -> Any:
    try:
        return hook(value, expected)
    except Malformed as wrong:
        wrong.where = step(key) + wrong.where
        raise


def _not(value: object, wanted: str) -> Malformed:
    return Malformed(f" has {kind(value)} instead of {wanted}")


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
                    do = "use the path of a regular file"
                    raise self.error(message, where=shown(name), do=do)
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
        if (why := differs(result)) is not None:
            message = f"the {self.noun} in the file does not belong to this run: {why}"
            raise self.error(message, where=str(path), do=self.remedy)
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
            message = f"the {self.noun} is larger than {self.largest} bytes"
            raise self.error(message, where=shown(name), do=self.smaller)
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
            message = wrong.what
            if message.startswith(" "):
                message = f"the {self.noun}{message}"
            do = wrong.do or self.remedy
            raise self.error(message, where=wrong.where or None, do=do) from None

    def _decoded(self, text: str | bytes | Parsed) -> T:
        tree = text.tree if isinstance(text, Parsed) else parse_json(text)
        if not isinstance(tree, dict):
            raise Malformed(f"the {self.noun} must be a JSON object, not {kind(tree)}")
        self._check_head(tree)
        body = {key: value for key, value in tree.items() if key not in self._head}
        available = [field.name for field in fields(self.holds)]  # type: ignore[arg-type]
        for key in body:
            if key not in available:
                message = f"the {self.noun} has an unknown field {shown(key)}"
                raise Malformed(message, do=nearest(key[:40], available))
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
        version = tree.get(key)
        number = 0
        if isinstance(version, Number) and version.text.isdecimal() and len(version.text) < 10:
            number = int(version.text)
        if number > self.version:
            message = f" has version {number}, but this qsync_fx reads version {self.version}"
            do = f"upgrade qsync_fx, or save the {self.noun} with this version"
            raise Malformed(message, key, do)
        if number != self.version:
            actual = kind(version) if key in tree else "missing"
            message, do = f"the {self.noun}'s {key} is {actual}", f'write "{key}": {self.version}'
            raise Malformed(message, key, do)


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
