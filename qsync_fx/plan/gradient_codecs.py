"""In what a plan has gradients sent: a codec for each parameter, by name.

DistributedDataParallel makes its buckets anew after the first step, so a plan says it of parameters: those of a bucket have one codec, but
for small ones, which go in FP32. What a plan does not name goes in FP32, too.

Invariant: names alone; what codes and what that costs is the business of qsync_fx/communication, which knows a codec of each name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from qsync_fx.codec import kind
from qsync_fx.codec.text import step
from qsync_fx.errors import PlanError, nearest, shown
from qsync_fx.precision import FORMATS, FP32

PLAIN: Final = FP32.name
"""A gradient as it is."""
CODECS: Final = (
    PLAIN,
    *(row.name for row in FORMATS.values() if row.plain and row.bits == 16),
    "1bit",
    "1bit*",
    *(f"qsgd{bits}" for bits in (2, 4, 8, 16)),
)
"""What a plan may name."""
BETWEEN_NODES: Final = "codecs between nodes of"
"""The note of a plan whose codecs were chosen for what goes between nodes alone; says how many ranks these have."""
_IN_A_ROW: Final = " in a row"


def between_nodes(ranks: int, in_a_row: bool = False) -> dict[str, str]:
    """Returns the note that says so, of nodes of so many ranks; `in_a_row` where these are in a row, whatever their hosts are called."""
    return {BETWEEN_NODES: f"{ranks} ranks{_IN_A_ROW * in_a_row}"}


def nodes_noted(notes: Mapping[str, str]) -> tuple[int, bool] | None:
    """Returns what `between_nodes` was given for these notes; None where they say nothing of nodes."""
    found = re.fullmatch(rf"([1-9]\d{{0,8}}) ranks({_IN_A_ROW})?", notes.get(BETWEEN_NODES, ""))
    return None if found is None else (int(found[1]), found[2] is not None)


def checked(given: object) -> dict[str, str]:
    """Returns codecs by parameter; raises `PlanError` where what is given are none."""
    if not isinstance(given, Mapping):
        do = 'write {"fc.weight": "qsgd8"}: the codec of each parameter'
        raise PlanError(f"codecs are a mapping, not {kind(given)}", where="codecs", do=do)
    for name, codec in given.items():
        where = f"codecs{step(str(name))}"
        if not isinstance(name, str) or not name or not name.isprintable():
            do = 'write one such as "fc.weight", as model.named_parameters() has it'
            raise PlanError("a parameter has a name that prints", where=where, do=do)
        if not isinstance(codec, str) or codec not in CODECS:
            what = shown(codec) if isinstance(codec, str) else kind(codec)
            raise PlanError(f"{what} is no codec of gradients", where=where, do=nearest(str(codec)[:40], CODECS))
    return dict(given)


def told(codecs: Mapping[str, str]) -> list[str]:
    """Returns lines that say which codec how many parameters have, and which; nothing where there are none."""
    found: dict[str, list[str]] = {}
    for name, codec in codecs.items():
        found.setdefault(codec, []).append(name)
    return [
        f"gradients in {codec}: {names[0]}" + (f" and {len(names) - 1} more parameters" if len(names) > 1 else "")
        for codec, names in sorted(found.items())
    ]
