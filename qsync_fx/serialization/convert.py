"""Conversion of JSON trees to dataclasses and back.

A dataclass is the format: fields are keys, and annotations are the allowed values: text, numbers,
booleans, `Literal`, optional values, lists, tuples, mappings by text, and dataclasses. The class
variable `kind`, which is written next to the fields, selects the member of a union of dataclasses.
A `Check` returns why a value is invalid, for rules beyond annotations.

Invariant: no value is coerced or ignored: "8" is no number, 1.0 no integer, true is not 1. Unknown
fields are errors, and so are missing ones without a default. Reading stops at the first error, with
its path.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from cattrs import Converter
from cattrs.gen import make_dict_unstructure_fn

from qsync_fx.errors import nearest, shown
from qsync_fx.serialization.strict_json import Malformed, Number, kind, step

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
    made.register_structure_hook(int, _leaf(_WORDS[int], _whole))
    made.register_structure_hook(float, _leaf(_WORDS[float], _number))
    made.register_structure_hook(
        str, _leaf(_WORDS[str], lambda value: value if isinstance(value, str) else None)
    )
    made.register_structure_hook(
        bool, _leaf(_WORDS[bool], lambda value: value if isinstance(value, bool) else None)
    )
    for origins, factory in (
        ((Literal,), _literal),
        ((tuple,), _tuple),
        ((list, Sequence), _list),
        ((dict, Mapping), _mapping),
    ):
        made.register_structure_hook_factory(
            functools.partial(_made_of, origins), functools.partial(factory, made)
        )
    made.register_structure_hook_factory(
        is_dataclass, functools.partial(_class, made, checks or {})
    )
    made.register_structure_hook_factory(lambda t: bool(_kinds(t)), functools.partial(_union, made))
    made.register_structure_hook_factory(
        lambda t: bool(_leaves(t)), functools.partial(_one_of, made)
    )
    made.register_unstructure_hook_factory(_has_kind, functools.partial(_with_kind, made))
    return made


def _made_of(origins: tuple[Any, ...], expected: Any) -> bool:
    return get_origin(expected) in origins


def _has_kind(expected: Any) -> bool:
    return is_dataclass(expected) and hasattr(expected, "kind")


def _leaf(wanted: str, take: Callable[[object], Any]) -> _Hook:
    def hook(value: object, _: Any) -> Any:
        if (result := take(value)) is None:
            raise _not(value, wanted)
        return result

    return hook


def _whole(value: object) -> int | None:
    if (
        isinstance(value, Number)
        and len(value.text) <= _LONGEST_NUMBER
        and value.text.lstrip("-").isdecimal()
    ):
        return int(value.text)
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    if isinstance(value, Number) and len(value.text) <= _LONGEST_NUMBER:
        value = float(value.text)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]


def _literal(_: Converter, expected: Any) -> _Hook:
    values = get_args(expected)
    wanted = " or ".join(map(repr, values))
    take = {str: lambda value: value, int: _whole}

    def hook(value: object, _: Any) -> Any:
        for available in values:
            if (
                type(result := take.get(type(available), lambda value: value)(value))
                is type(available)
                and result == available
            ):
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


def _class(by: Converter, checks: Mapping[Any, Check], expected: Any) -> _Hook:
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
        if (unknown := next((key for key in value if key not in types), None)) is not None:
            raise Malformed(
                f" has an unknown field {shown(unknown)}", do=nearest(unknown[:40], types)
            )
        if (missing := next((name for name in needed if name not in value), None)) is not None:
            raise Malformed(f" lacks the field {missing!r}")
        made = expected(
            **{name: _at(name, hooks[name], part, types[name]) for name, part in value.items()}
        )
        if check is not None and (why := check(made)):
            raise Malformed(why)
        return made

    return hook


def _kinds(expected: Any) -> dict[str, Any]:
    """Return the classes of a union by their kind; empty for other types."""
    members = get_args(expected) if get_origin(expected) in (Union, UnionType) else ()
    result = {member.kind: member for member in members if _has_kind(member)}
    return result if len(result) == len(members) else {}


def _union(by: Converter, expected: Any) -> _Hook:
    kinds = _kinds(expected)

    def hook(value: object, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _not(value, "an object")
        reported = value.get("kind")
        if not isinstance(reported, str) or reported not in kinds:
            raise Malformed(
                f" has {kind(reported)} instead of {' or '.join(map(repr, kinds))}", step("kind")
            )
        return by.structure(
            {key: part for key, part in value.items() if key != "kind"}, kinds[reported]
        )

    return hook


def _leaves(expected: Any) -> tuple[Any, ...]:
    """Return the members of a union of text and numbers; empty for other types.

    A single type, or one type or None, is not such a union.
    """
    members = get_args(expected) if get_origin(expected) in (Union, UnionType) else ()
    plain = tuple(member for member in members if member is not type(None))
    return plain if len(plain) > 1 and {bool, int, float, str}.issuperset(plain) else ()


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
