"""Identity of operators, which is the same across graph splits, ranks, machines and torch versions.

Invariant: ids and texts are one to one: `str(OpId.parse(text)) == text`. Reserved or unprintable
characters of a module path are escaped as %XX of their UTF-8 bytes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

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
_PATTERN = (
    'write module segments separated by dots, then "/operator", and "@module.before" and "#index" '
    'behind it; use "*", "?", "[02]", "[0-9]" or "[!0]" within a name, "{query,key}" or "{0..11}" '
    'for alternatives, and "**" for any number of segments; escape special characters of a name as '
    "in operator ids: %25 for %, %2A for *, %3F for ?, %5B for [, %5D for ], %7B for {, %7D for }"
)
_ALPHABETS = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to an expression over ids; raise `PlanError` if it is malformed."""
    if not isinstance(pattern, str):
        raise PlanError(f"a pattern must be a string, not {type(pattern).__name__}", do=_PATTERN)
    return _compiled(pattern)


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _LONGEST_PATTERN:
        raise _malformed(pattern[:50], f"is longer than {_LONGEST_PATTERN} characters")
    if not pattern.isprintable():
        raise _malformed(pattern, "has non-printable characters")
    return re.compile("|".join(map(_expression, _written_out(pattern))))


def _malformed(pattern: str, problem: str) -> PlanError:
    return PlanError(f"the pattern {shown(pattern)} {problem}", do=_PATTERN)


@functools.lru_cache(maxsize=4096)
def module_regex(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to an expression over paths of modules in which it may select operators."""
    pattern_regex(pattern)
    return re.compile("|".join(map(_module_expression, _written_out(pattern))))


def _module_expression(pattern: str) -> str:
    module, slash, rest = pattern.partition("/")
    _, index, after = rest.partition("#")[0].partition("@")
    if module or not slash:
        return _path(module, pattern, full=bool(slash))
    if after:
        return _path(after, pattern, full=True)
    if index:
        return r"\Z"
    return ""


def alternatives(pattern: str) -> list[str]:
    """Return the pattern restricted to each single alternative in its braces; [] without a choice.

    A range such as `{0..11}` is one alternative, since its numbers need not all exist.
    """
    result = []
    for braces in re.finditer(r"\{([^{}]*)\}", pattern):
        items = [text.strip() for text in braces[1].split(",")]
        if len(items) == 1:
            continue
        for item in items:
            only = f"{{{item}}}" if _NUMBERS.fullmatch(item) else item
            result.append(f"{pattern[: braces.start()]}{only}{pattern[braces.end() :]}")
    return result


def _written_out(pattern: str) -> list[str]:
    """Return the brace-free patterns to which a pattern expands."""
    parts: list[list[str]] = []
    count = 1
    for text in re.split(r"(\{[^{}]*\})", pattern):
        if text.startswith("{") and text.endswith("}"):
            parts.append(_alternatives(text[1:-1], pattern))
        elif brace := re.search(r"[{}]", text):
            raise _malformed(pattern, f"has an unmatched {brace[0]} or nested braces")
        else:
            parts.append([text])
        count *= len(parts[-1])
        if count * len(pattern) > _LONGEST_WRITTEN_OUT:
            raise _malformed(pattern, "expands to too many patterns")
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _alternatives(braced: str, pattern: str) -> list[str]:
    if not braced:
        raise _malformed(pattern, "has empty braces")
    result: list[str] = []
    for text in map(str.strip, braced.split(",")):
        if numbers := _NUMBERS.fullmatch(text):
            first, last = sorted(map(int, numbers.groups()))
            if last - first > _LONGEST_WRITTEN_OUT:
                raise _malformed(pattern, "expands to too many patterns")
            result += map(str, range(first, last + 1))
        else:
            result.append(text)
    return result


def _expression(pattern: str) -> str:
    """Return the expression for a pattern without braces."""
    module, slash, rest = pattern.partition("/")
    if not slash:
        if not module:
            raise _malformed(pattern, "is empty")
        return _path(module, pattern)
    rest, sharp, index = rest.partition("#")
    operator, position, after = rest.partition("@")
    if not operator or "/" in rest + index or "**" in operator:
        raise _malformed(pattern, 'is not a pattern: after "/" stands one operator name')
    if sharp and not re.fullmatch(r"0|[1-9][0-9]{0,8}", index):
        raise _malformed(pattern, "has no number after #")
    before, position_part, index_part = "", "(?:@[^#]*+)?", "(?:#[0-9]++)?"
    if module:
        before = _path(module, pattern, full=True)
    if after:
        position_part = rf"@{_path(after, pattern, full=True)}"
    elif position:
        position_part = "(?!@)"
    if index == "0":
        index_part = "(?!#)"
    elif sharp:
        index_part = f"#{index}"
    name = rf"/(?>{_glob(operator, _IN_OPERATOR, pattern)}(?=[@#]|\Z))"
    return rf"{before}{name}{position_part}{index_part}\Z"


def _path(glob: str, pattern: str, full: bool = False) -> str:
    """Return the expression for a glob over module paths; unless `full`, submodules match too."""
    blocks: list[list[str]] = [[]]
    for segment in glob.split("."):
        if segment == "**":
            blocks.append([])
        elif not segment or "**" in segment or "#" in segment or "@" in segment:
            raise _malformed(pattern, f"is not a pattern: {shown(segment)} is not a segment")
        else:
            blocks[-1].append(rf"(?>(?=[^./#@]){_glob(segment, _IN_SEGMENT, pattern)}{_SEPARATOR})")
    first, *others = ("".join(block) for block in blocks)
    end = _END if full else ""
    if not others:
        return first + end
    *middle, last = others
    result = first + "".join(f"(?>{_ANY_SEGMENTS}?{block})" for block in middle if block)
    if full:
        return f"{result}{_ANY_SEGMENTS}?{last}{end}"
    return f"{result}(?>{_ANY_SEGMENTS}?{last})" if last else result


def _glob(glob: str, character: str, pattern: str) -> str:
    """Return the expression for a glob in which `*` matches any run of `character`."""
    pieces, index = [""], 0
    while index < len(glob):
        part = _PART_OF_GLOB.match(glob, index)
        if part is None:
            raise _malformed(pattern, f"has a misplaced {glob[index]}")
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
            raise _malformed(pattern, f"has a misplaced {one_of[index]}")
        first, last = member.group("first", "last")
        if first is None:
            yield re.escape(member[0])
        elif first <= last and any({first, last} <= set(alphabet) for alphabet in _ALPHABETS):
            yield f"[{first}-{last}]"
        else:
            raise _malformed(pattern, f"has an invalid range [{first}-{last}]")
        index = member.end()
    if not one_of:
        raise _malformed(pattern, "has empty brackets")


_LARGEST_INDEX = 999_999_999
_ESCAPES = "%/#@*?[]{}"
_NEEDS_NO_ESCAPE = re.compile(rf"[^{re.escape(_ESCAPES)}]*")
_ESCAPED_RUN = re.compile(r"(?:%[0-9A-F]{2})+")
_TEXT = re.compile(r"([^/#@]*)/([^/#@]+)(?:@([^/#@]+))?(?:#([1-9][0-9]{0,8}))?")
_FORMAT = (
    'write "module.path/operator", and append "#1" for its second occurrence in that module; '
    'write an operator outside all modules as "/operator@last.module.before.it"'
)


@dataclass(frozen=True, order=True)
class OpId:
    """Identity of one operator; as text "encoder.layer.0.self/matmul#1", "/relu@layer3.1#2".

    Attributes:
        module: path of the calling module, as in a state_dict; "" outside every submodule.
        index: occurrence among operators of the same name in the module (outside modules, since
            `after`).
        after: outside modules, the last module called before, "" at the start. Counting from there
            preserves ids when a graph is split.

    Raises:
        PlanError: an impossible id: wrong types, an empty operator or path segment, or `after`
            within a module.
    """

    module: str
    operator: str
    index: int = 0
    after: str = ""

    def __post_init__(self) -> None:
        for name in ("module", "operator", "after"):
            if not isinstance(getattr(self, name), str):
                actual = type(getattr(self, name)).__name__
                message = f"the {name} of an operator id must be a string, not {actual}"
                raise PlanError(message, do=_FORMAT)
        if type(self.index) is not int or not 0 <= self.index <= _LARGEST_INDEX:
            message = f"the index of an operator id must be an integer up to {_LARGEST_INDEX}"
            raise PlanError(message, do=_FORMAT)
        if not self.operator:
            raise PlanError("the operator id has no operator name", do=_FORMAT)
        for path in (self.module, self.after):
            if path and "" in path.split("."):
                message = f"the module path {shown(path)} has an empty segment"
                raise PlanError(message, do=_FORMAT)
        if self.module and self.after:
            where = f"module {shown(self.module)}, after {shown(self.after)}"
            raise PlanError("the operator id has `module` and `after`", where=where, do=_FORMAT)

    def __str__(self) -> str:
        text = f"{escaped(self.module)}/{escaped(self.operator)}"
        if self.after:
            text += f"@{escaped(self.after)}"
        return f"{text}#{self.index}" if self.index else text

    @classmethod
    def parse(cls, text: str) -> OpId:
        """Read the text form; raise `PlanError` for any text that `str` does not write."""
        if not isinstance(text, str):
            raise PlanError(
                f"an operator id must be a string, not {type(text).__name__}", do=_FORMAT
            )
        result = _TEXT.fullmatch(text)
        if result is None:
            raise PlanError(f"{shown(text)} is not an operator id", do=_FORMAT)
        try:
            module, operator, after = (_unescaped(part or "") for part in result.group(1, 2, 3))
        except UnicodeDecodeError:
            message = f"{shown(text)} has an escape %XX that is not valid UTF-8"
            raise PlanError(message, do=_FORMAT) from None
        op_id = cls(module, operator, int(result[4] or 0), after)
        if str(op_id) != text:
            message = f"{shown(text)} is not the normal form of this operator id"
            raise PlanError(message, do=f"write {str(op_id)!r}")
        return op_id

    def matches(self, pattern: str) -> bool:
        """Return whether `pattern` selects this operator; raise `PlanError` if it is malformed.

        Within a path segment (between dots) `*` matches any characters, `?` one character, `[02]`
        or `[0-9]` one of a set, `[!0]` one outside it. `**` matches any number of segments,
        including none. `{query,key}` matches either, `{0..11}` each of the numbers. Reserved
        characters of a name are escaped as in ids: "%5B" for "[".

        A pattern without "/" selects all operators of a module and of its submodules:
        "encoder.layer.*.output" selects "encoder.layer.0.output.dense/linear". A pattern with "/"
        selects operators of exactly that module: "encoder.layer.*.output.dense/linear",
        `**/embedding`, `/relu`. Without "#index" and "@after" it selects every occurrence; "#0" is
        the first one, "/relu@" those before any module.

        Matching is linear in the length of the id.
        """
        return pattern_regex(pattern).match(str(self)) is not None


@dataclass
class Numbering:
    """Counter of operators per module and name, and the last module called."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    last: str = ""

    def number(self, module: str, operator: str) -> OpId:
        if module:
            self.last = module
            return self._next(module, operator, "")
        return self._next("", operator, self.last)

    def put_in(self, near: OpId, operator: str) -> OpId:
        """Return the id of an operator inserted at `near`; the model's ids do not change."""
        return self._next(near.module, operator, near.after)

    def _next(self, module: str, operator: str, after: str) -> OpId:
        self.counts[module, operator, after] += 1
        return OpId(module, operator, self.counts[module, operator, after] - 1, after)

    def copy(self) -> Numbering:
        return Numbering(Counter(self.counts), self.last)


def escaped(part: str) -> str:
    if part.isprintable() and _NEEDS_NO_ESCAPE.fullmatch(part):
        return part
    return "".join(
        c
        if c.isprintable() and c not in _ESCAPES
        else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))
        for c in part
    )


def _unescaped(part: str) -> str:
    def decoded(run: re.Match[str]) -> str:
        return bytes.fromhex(run[0].replace("%", "")).decode("utf-8", "surrogatepass")

    return _ESCAPED_RUN.sub(decoded, part)
