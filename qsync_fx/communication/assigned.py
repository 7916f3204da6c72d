"""Which codec the gradient of each parameter is sent in: one for all that are large enough, or as a plan says.

Invariant: `text` tells two assignments apart, so that ranks and saved states that agree on it code alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qsync_fx.communication.codecs import PLAIN, Codec, codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.geometry import threshold
from qsync_fx.errors import PlanError, shown


@dataclass(frozen=True)
class Assigned:
    """
    Attributes:
        name: what reports call it.
        said: the same at length, as ranks compare it.
        text: what messages and saved states are of.
        codecs: of each parameter, in the order of the model.
        coded: which of them are coded; others are small, or are to go in FP32.
    """

    name: str
    said: str
    text: str
    codecs: tuple[Codec, ...]
    coded: tuple[bool, ...]

    @property
    def adaptive(self) -> Adaptive | None:
        """AQGB, where it chooses levels as training goes on; None where all is said beforehand, as it is in a plan."""
        return next((codec for codec in self.codecs if isinstance(codec, Adaptive)), None)


def to_all(codec: Codec, sizes: Sequence[int], least: int | None = None) -> Assigned:
    """Returns one codec for all parameters of `least` values or more; by default so that more than 99% of all values are coded."""
    least = threshold(sizes) if least is None else least
    coded = tuple(size >= least for size in sizes)
    return Assigned(codec.name, repr(codec), repr(codec), tuple(codec if one else PLAIN for one in coded), coded)


def by_plan(planned: Mapping[str, str], names: Sequence[str]) -> Assigned:
    """Returns what a plan says; raises `PlanError` where it names a parameter that there is not."""
    for name in planned:
        if name not in names:
            what = f"the plan has a codec for the gradient of {shown(name)}, which the model does not train"
            raise PlanError(what, where="codecs", do="find the plan of this model: its parameters have other names")
    codecs = tuple(codec_named(planned.get(name, PLAIN.name)) for name in names)
    kinds = " and ".join(sorted({codec.name for codec in codecs if codec != PLAIN}))
    said = "\n".join(f"{name} {codec!r}" for name, codec in zip(names, codecs, strict=True))
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    called = f"a plan's {kinds}" if kinds else "a plan without codecs"
    return Assigned(
        called,
        called,
        f"the codecs of a plan ({digest})",
        codecs,
        tuple(codec != PLAIN for codec in codecs),
    )
