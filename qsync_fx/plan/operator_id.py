"""Identity of operators that is independent of the node names of a graph.

Node names do not identify operators: DDP compiles each bucket separately, so each has a node
"linear", and a graph break renames the nodes after it. The calling module, the name of the
operator's row and its occurrence within the module are the same across graph splits, ranks,
machines and versions of torch, so a plan is portable.

Invariant: ids and texts are one to one: `OpId.parse(str(op_id)) == op_id` and
`str(OpId.parse(text)) == text`. Reserved or unprintable characters of a module path are escaped as
%XX of their UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from qsync_fx.errors import PlanError, shown
from qsync_fx.plan.patterns import pattern_regex

_LARGEST_INDEX = 999_999_999
_ESCAPES = "%/#@*?[]{}"
_NEEDS_NO_ESCAPE = re.compile(rf"[^{re.escape(_ESCAPES)}]*")
_ESCAPED = re.compile(r"(?:%[0-9A-F]{2})+")
_TEXT = re.compile(r"([^/#@]*)/([^/#@]+)(?:@([^/#@]+))?(?:#([1-9][0-9]{0,8}))?")
_ID_FORMAT = (
    'write "module.path/operator", and append "#1" for its second occurrence in that module; '
    'write an operator outside all modules as "/operator@last.module.before.it"'
)


@dataclass(frozen=True, order=True)
class OpId:
    """Identity of one operator.

    The text form of `str` and `parse` is "encoder.layer.0.attention.self/matmul#1",
    "/relu@layer3.1#2", "/linear".

    Attributes:
        module: path of the calling module, as in a state_dict:
            "encoder.layer.0.attention.self.query"; "" outside every submodule.
        operator: name of its row: "linear".
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
                raise PlanError(
                    f"the {name} of an operator id must be a string, "
                    f"not {type(getattr(self, name)).__name__}"
                )
        if type(self.index) is not int or not 0 <= self.index <= _LARGEST_INDEX:
            raise PlanError(
                f"the index of an operator id must be an integer from 0 to {_LARGEST_INDEX}"
            )
        if not self.operator:
            raise PlanError("the operator id has no operator name", do=_ID_FORMAT)
        for path in (self.module, self.after):
            if path and "" in path.split("."):
                raise PlanError(
                    f"the module path {shown(path)} has an empty segment", do=_ID_FORMAT
                )
        if self.module and self.after:
            raise PlanError(
                "the operator id has both `module` and `after`",
                where=f"module {shown(self.module)}, after {shown(self.after)}",
                do="set `after` only for operators outside modules",
            )

    def __str__(self) -> str:
        after = f"@{escaped(self.after)}" if self.after else ""
        index = f"#{self.index}" if self.index else ""
        return f"{escaped(self.module)}/{escaped(self.operator)}{after}{index}"

    @classmethod
    def parse(cls, text: str) -> OpId:
        """Read the text form; raise `PlanError` for any text that `str` does not write."""
        if not isinstance(text, str):
            raise PlanError(
                f"an operator id must be a string, not {type(text).__name__}", do=_ID_FORMAT
            )
        result = _TEXT.fullmatch(text)
        if result is None:
            raise PlanError(f"{shown(text)} is not an operator id", do=_ID_FORMAT)
        try:
            module, operator, after = (_unescaped(part or "") for part in result.group(1, 2, 3))
        except UnicodeDecodeError:
            raise PlanError(
                f"{shown(text)} has an escape %XX that is not valid UTF-8",
                do="escape each byte of the character's UTF-8 encoding",
            ) from None
        op_id = cls(module, operator, int(result[4] or 0), after)
        if str(op_id) != text:
            raise PlanError(
                f"{shown(text)} is not the normal form of this operator id",
                do=f"write {str(op_id)!r}",
            )
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
        "**/embedding", "/relu". Without "#index" and "@after" it selects every occurrence; "#0" is
        the first one, "/relu@" those before any module.

        Matching is linear in the length of the id.
        """
        return pattern_regex(pattern).match(str(self)) is not None


@dataclass
class Numbering:
    """Counter of operators per module and name, and the last module called."""

    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    last: str = ""

    def number(self, module: str, operator: str) -> OpId:
        after = "" if module else self.last
        if module:
            self.last = module
        key = (module, operator, after)
        self.seen[key] += 1
        return OpId(module, operator, self.seen[key] - 1, after)

    def put_in(self, near: OpId, operator: str) -> OpId:
        """Return the id of an operator inserted at `near`; the model's ids do not change."""
        key = (near.module, operator, near.after)
        self.seen[key] += 1
        return OpId(near.module, operator, self.seen[key] - 1, near.after)

    def copy(self) -> Numbering:
        return Numbering(Counter(self.seen), self.last)


def escaped(part: str) -> str:
    if part.isprintable() and _NEEDS_NO_ESCAPE.fullmatch(part):
        return part
    return "".join(c if c.isprintable() and c not in _ESCAPES else _hexadecimal(c) for c in part)


def _hexadecimal(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _unescaped(part: str) -> str:
    return _ESCAPED.sub(
        lambda run: bytes.fromhex(run[0].replace("%", "")).decode("utf-8", "surrogatepass"), part
    )
