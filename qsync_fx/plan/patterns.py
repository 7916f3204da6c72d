"""Patterns that select operators by id; `OpId.matches` documents the syntax.

A pattern is compiled to one regular expression over the texts of ids, which matches in time linear
in the id. Escaped characters match literally. Malformed patterns raise an error that names the
character.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable

from qsync_fx.errors import PlanError, shown

_LONGEST_PATTERN = 1000
_LONGEST_WRITTEN_OUT = 10_000

# An id consists of characters, plain or as %XX of their UTF-8 bytes; segments are separated by
# dots.
# The groups are atomic (?>...): a `*` or `**` matches the leftmost continuation that fits. The text
# between two of them has a fixed number of characters, so a later match never helps: discarding the
# alternatives loses no match, and matching backtracks over one segment at most.
_ESCAPED = r"%[0-9A-F]{2}(?:%[89AB][0-9A-F])*+"
_IN_SEGMENT = rf"(?>[^./#@%]|{_ESCAPED})"
_IN_OPERATOR = rf"(?>[^@#%]|{_ESCAPED})"
_END = r"(?=[/#]|\Z)"
_SEPARATOR = rf"(?:\.|{_END})"
_ANY_SEGMENTS = rf"(?:[^./#@]++{_SEPARATOR})*"

_PART_OF_GLOB = re.compile(rf"\*|\?|\[(?P<none_of>[!^]?)(?P<one_of>[^\[\]]*)\]|{_ESCAPED}|[^%\[\]]")
_MEMBER = re.compile(rf"(?P<first>[0-9A-Za-z])-(?P<last>[0-9A-Za-z])|{_ESCAPED}|[^%*?]")
_NUMBERS = re.compile(r"(0|[1-9][0-9]{0,8})\.\.(0|[1-9][0-9]{0,8})")
_ALPHABETS = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to an expression over ids; raise `PlanError` if it is malformed."""
    if not isinstance(pattern, str):
        raise PlanError(
            f"a pattern must be a string, not {type(pattern).__name__}",
            do='write a pattern such as "encoder.*.output"',
        )
    return _compiled(pattern)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _LONGEST_PATTERN:
        raise PlanError(
            f"the pattern is too long: {len(pattern)} characters",
            do=f"use at most {_LONGEST_PATTERN} characters",
        )
    if not pattern.isprintable():
        raise PlanError(
            f"{shown(pattern)} has non-printable characters",
            do="escape them as %XX, as in operator ids",
        )
    return re.compile("|".join(map(_expression, _written_out(pattern))))


@functools.lru_cache(maxsize=4096)
def module_regex(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to an expression over module paths in which it may select operators.

    For operators outside modules it is the path of the preceding module.

    Raises:
        PlanError: the pattern is malformed.
    """
    pattern_regex(pattern)
    return re.compile("|".join(map(_module_expression, _written_out(pattern))))


def _module_expression(pattern: str) -> str:
    module, slash, rest = pattern.partition("/")
    _, index, after = rest.partition("#")[0].partition("@")
    if module or not slash:
        return _path(module, pattern, full=bool(slash))
    if after:
        return _path(after, pattern, full=True)
    return r"\Z" if index else ""


def alternatives(pattern: str) -> list[str]:
    """Return the pattern restricted to each single alternative in its braces; [] without a choice.

    A range such as `{0..11}` is one alternative, since its numbers need not all exist.
    """
    texts = re.split(r"\{([^{}]*)\}", pattern)
    result = []
    for index in range(1, len(texts), 2):
        inputs = [text.strip() for text in texts[index].split(",")]
        for item in inputs if len(inputs) > 1 else ():
            only = f"{{{item}}}" if _NUMBERS.fullmatch(item) else item
            full = [f"{{{text}}}" if n % 2 else text for n, text in enumerate(texts)]
            result.append("".join([*full[:index], only, *full[index + 1 :]]))
    return result


def _written_out(pattern: str) -> list[str]:
    """Return the brace-free patterns to which a pattern expands."""
    parts: list[list[str]] = []
    count = 1
    for index, text in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        if index % 2 == 0 and ("{" in text or "}" in text):
            raise PlanError(
                f"{shown(pattern)} has an unmatched {'{' if '{' in text else '}'} or nested braces",
                do='write "{attention,output}" or "{0..11}"; escape a brace in a name as %7B or '
                "%7D, as in operator ids",
            )
        parts.append(_alternatives(text, pattern) if index % 2 else [text])
        count *= len(parts[-1])
        if count * len(pattern) > _LONGEST_WRITTEN_OUT:
            raise _too_long(pattern)
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _alternatives(braced: str, pattern: str) -> list[str]:
    if not braced:
        raise PlanError(
            f"{shown(pattern)} has empty braces",
            do='write the alternatives, as in "{attention,output}" or "{0..11}"',
        )
    result: list[str] = []
    for text in map(str.strip, braced.split(",")):
        if numbers := _NUMBERS.fullmatch(text):
            first, last = sorted(map(int, numbers.groups()))
            if last - first > _LONGEST_WRITTEN_OUT:
                raise _too_long(pattern)
            result += map(str, range(first, last + 1))
        else:
            result.append(text)
    return result


def _too_long(pattern: str) -> PlanError:
    return PlanError(
        f"{shown(pattern)} expands to too many patterns",
        do=f"use at most {_LONGEST_WRITTEN_OUT} characters in the expansion of its braces, or use "
        '"*", which matches any number',
    )


def _expression(pattern: str) -> str:
    """Return the expression for a pattern without braces."""
    module, slash, rest = pattern.partition("/")
    if not slash:
        if not module:
            raise PlanError("the pattern is empty", do='write "**" to select every operator')
        return _path(module, pattern)
    rest, sharp, index = rest.partition("#")
    operator, position, after = rest.partition("@")
    if not operator or "/" in rest + index or "**" in operator:
        raise PlanError(
            f"{shown(pattern)} is not a pattern",
            do='write one operator name after "/", such as "softmax", "conv*" or "*"; "**" '
            "matches only module segments",
        )
    if sharp and not re.fullmatch(r"0|[1-9][0-9]{0,8}", index):
        raise PlanError(
            f"{shown(pattern)} has no number after #",
            do='write "#0", "#1", ..., or remove "#" to select all occurrences',
        )
    tail = rf"/(?>{_glob(operator, _IN_OPERATOR, pattern)}(?=[@#]|\Z))"
    tail += (
        (rf"@{_path(after, pattern, full=True)}" if after else "(?!@)")
        if position
        else "(?:@[^#]*+)?"
    )
    tail += ("(?!#)" if index == "0" else f"#{index}") if sharp else "(?:#[0-9]++)?"
    return rf"{_path(module, pattern, full=True) if module else ''}{tail}\Z"


def _path(glob: str, pattern: str, full: bool = False) -> str:
    """Return the expression for a glob over module paths; unless `full`, submodules match too."""
    blocks: list[list[str]] = [[]]
    for segment in glob.split("."):
        if segment == "**":
            blocks.append([])
        elif not segment or "**" in segment or "#" in segment or "@" in segment:
            raise PlanError(
                f"{shown(pattern)} is not a pattern",
                do='write segments separated by dots, "*" within a segment, and "**" for any '
                'number of segments; write "#" and "@" after "/"',
            )
        else:
            blocks[-1].append(rf"(?>(?=[^./#@]){_glob(segment, _IN_SEGMENT, pattern)}{_SEPARATOR})")
    first, *others = ("".join(block) for block in blocks)
    if not others:
        return first + (_END if full else "")
    *middle, last = others
    result = first + "".join(f"(?>{_ANY_SEGMENTS}?{block})" for block in middle if block)
    return result + (
        f"{_ANY_SEGMENTS}?{last}{_END}" if full else f"(?>{_ANY_SEGMENTS}?{last})" if last else ""
    )


def _glob(glob: str, character: str, pattern: str) -> str:
    """Return the expression for a glob in which `*` matches any run of `character`."""
    pieces, index = [""], 0
    while index < len(glob):
        part = _PART_OF_GLOB.match(glob, index)
        if part is None:
            raise _stray(glob[index], pattern)
        if part[0] == "*":
            pieces.append("")
        elif part[0] == "?":
            pieces[-1] += character
        elif part["one_of"] is None:
            pieces[-1] += re.escape(part[0])
        else:
            item = f"(?:{'|'.join(_members(part['one_of'], pattern))})"
            pieces[-1] += f"(?!{item}){character}" if part["none_of"] else item
        index = part.end()
    first, *others = pieces
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>{character}*?{piece})" for piece in middle) + f"{character}*{last}"


def _members(one_of: str, pattern: str) -> Iterable[str]:
    """Yield the expressions for the members of a set between [ and ]."""
    index = 0
    while index < len(one_of):
        member = _MEMBER.match(one_of, index)
        if member is None:
            raise _stray(one_of[index], pattern)
        first, last = member.group("first", "last")
        if first is None:
            yield re.escape(member[0])
        elif not any(
            first in alphabet and last in alphabet and first <= last for alphabet in _ALPHABETS
        ):
            raise PlanError(
                f"{shown(pattern)} has an invalid range [{first}-{last}]",
                do="write a range such as [0-9] or [a-f]",
            )
        else:
            yield f"[{first}-{last}]"
        index = member.end()
    if not one_of:
        raise _stray("[", pattern)


def _stray(character: str, pattern: str) -> PlanError:
    return PlanError(
        f"{shown(pattern)} has a misplaced {character}",
        do='write "[02]", "[0-9]" or "[!0]" for one character, without . / # @ in the brackets; '
        "escape special characters of a name as in operator ids: %25 for %, %2A for *, %3F for ?, "
        "%5B for [, %5D for ]",
    )
