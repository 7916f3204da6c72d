"""Plan files: reading text that anyone may have written, and replacing a file without ever leaving half of one.

A plan is data from elsewhere: another rank, another machine, a web page. Invariant: whatever the bytes, reading them ends
in fields of the right version or in a `PlanError` that says what is wrong and where, within bounded memory and time; and a
path that held a plan before a failed write holds it afterwards.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from qsync_fx.errors import PlanError, QSyncError, nearest, shown
from qsync_fx.files import write_text

FORMAT = "qsync-plan"
VERSION = 1
LARGEST = 8 * 2**20
"""Bytes of the largest plan that is read: some hundred thousand operators."""

_FIELDS = ("default", "patterns", "operators", "notes")
_HOW_TO_GET_ONE = "write plans with Plan.save"

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class _Number:
    """A number as written. No field is one but the version, so that none is ever converted: 10**9999 costs nothing."""

    text: str


class _Object(dict[str, object]):
    """A JSON object that remembers a key that was written twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        repeated = (key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        self.twice = None if len(self) == len(pairs) else next(repeated)


def kind(value: object) -> str:
    """Returns what a value is, in the words of JSON where it has them, for error messages."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _Number(text):
            return f"the number {text}" if len(text) <= 40 else f"a number of {len(text)} digits"
        case str():
            return "text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return f"a value of type {type(value).__name__}"


def fields(text: str | bytes) -> dict[str, object]:
    """Returns the fields of a plan of this version, of which only `patterns`, `operators` and their kin may be wrong yet.

    Raises `PlanError` for anything but a JSON object of the plan format with known, unrepeated keys.
    """
    found = _decoded(text)
    if not isinstance(found, _Object):
        raise PlanError(f"a plan is a JSON object, not {kind(found)}", do=_HOW_TO_GET_ONE)
    if found.get("format") != FORMAT:
        raise PlanError(
            "the JSON does not say that it is a plan",
            where="format",
            do=f'a plan has "format": "{FORMAT}" and "version": {VERSION}; {_HOW_TO_GET_ONE}',
        )
    version = found.get("version")
    number = (
        int(version.text) if isinstance(version, _Number) and version.text.isdigit() and len(version.text) < 10 else 0
    )
    if number > VERSION:
        raise PlanError(
            f"the plan has version {number}, and this qsync_fx reads version {VERSION}",
            where="version",
            do="upgrade qsync_fx, or have the plan saved by this version",
        )
    if number != VERSION:
        given = kind(version) if "version" in found else "missing"
        raise PlanError(f"the plan's version is {given}", where="version", do=f'write "version": {VERSION}')
    unknown = next((key for key in found if key not in ("format", "version", *_FIELDS)), None)
    if unknown is not None:
        raise PlanError(f"a plan has no field {shown(unknown)}", do=nearest(unknown[:40], _FIELDS))
    for name, value in (("", found), *found.items()):
        if isinstance(value, _Object) and value.twice is not None:
            raise PlanError(f"the key {shown(value.twice)} is written twice", where=name or None, do="keep one of them")
    return {name: found[name] for name in _FIELDS if name in found}


def _decoded(text: str | bytes) -> object:
    if not isinstance(text, str | bytes):
        raise PlanError(f"a plan is read from text, not {kind(text)}", do="use Plan.load for files")
    if len(text) > LARGEST:
        raise PlanError(f"the plan is larger than {LARGEST} bytes", do="use patterns in place of single operators")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise PlanError(
                "the plan is not UTF-8", where=f"byte {error.start}", do="save the file as UTF-8, or get an intact copy"
            ) from None
    try:
        return json.loads(
            text, object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=_Number
        )
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        raise PlanError(
            "the plan ends in the middle" if cut and text.strip() else "the plan is empty" if cut else "not JSON",
            where=f"line {error.lineno}, column {error.colno}: {error.msg}",
            do="get a whole copy" if cut else f"correct it there; {_HOW_TO_GET_ONE}",
        ) from None
    except RecursionError:
        raise PlanError("the plan is nested too deeply", do=f"a plan nests three levels; {_HOW_TO_GET_ONE}") from None


def _name(path: Path) -> str:
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise PlanError(f"a plan lives at a path, not {kind(path)}", do='give a path such as "plan.json"')
    return name


def _open_at_once(name: str, flags: int) -> int:
    # A pipe without a writer would block `open`; that it is no file is found afterwards.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def read(path: Path) -> bytes:
    """Returns the bytes of a plan file; raises `PlanError` where there is no file, or one too large or not readable."""
    name = _name(path)
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PlanError("the plan is not a file", where=shown(name), do="give the path of a regular file")
            return file.read(LARGEST + 1)
    # ValueError: a path with a null character, or one that the file system cannot encode.
    except (OSError, ValueError) as error:
        raise PlanError(
            f"the plan cannot be read: {getattr(error, 'strerror', None) or error}",
            where=shown(name),
            do="check the path and its permissions",
        ) from error


def write(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text` in one step; on any failure raises and leaves what was there.

    Raises `PlanError` where nothing can be written. A link is written through.
    """
    name = _name(path)
    if len(text.encode()) > LARGEST:
        raise PlanError(f"the plan is larger than {LARGEST} bytes", where=shown(name), do="use patterns")
    try:
        target = os.path.realpath(name)
        if os.path.exists(target) and not os.path.isfile(target):
            raise PlanError("the plan would replace something that is no file", where=shown(name), do="give a new path")
        write_text(pathlib.Path(target), text)
    except (QSyncError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        what, do = (error.what, error.do) if isinstance(error, QSyncError) else (str(error), "give another path")
        raise PlanError(f"the plan is not saved: {what}", where=shown(name), do=do) from error
