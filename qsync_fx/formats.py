"""The table of number formats.

Invariant: everything that qsync_fx knows of a format stands in its row, and nothing else in the tree names formats one by one. A new
format is one new row: casts, lowering, promotion, cost and the command line derive from it.

Four facts make the rest derive. A format is kept in `dtype`, a torch type that holds each of its values exactly. A *scaled* format
is kept as `q * scale`. Where a device has no unit for a format its products are computed in `carrier`, a float format in which
every value of the format is exact and whose products are accumulated in FP32, so that the numerics are the format's own. Rows with
the same values have the same units and kernels, whose name for them is that of the first such row (`encoding`).

A row is written with the names of the formats that it refers to, and read as the formats themselves: nobody looks one up again.

INT8 has two rows. `int8` rounds the incoming gradient to BF16, as QSync does (section IV-B). `int8_grad` rounds it to INT8 too, with one
scale and by default stochastically: all three products are then INT8's, faster on its tensor cores, and gradients are noisier.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from qsync_fx.errors import PrecisionError, nearest


@dataclass(frozen=True, eq=False)
class Precision:
    """One number format.

    Attributes:
        name: what users write.
        kind: "float", or "integer" for symmetric fixed point.
        bits: bits of information a value, which is also what a native kernel moves.
        mantissa: stored mantissa bits `k`; the relative step is `2**-k`. 0 for integers.
        e_min: exponent of the smallest normal number. 0 for integers.
        max: largest finite magnitude (float) or largest level (integer).
        dtype: the torch type that stores it.
        scaled: a value is `q * scale`, the scale FP32 per tensor or per channel.
        carrier: the format its products are computed in where the device has no unit of its own for it.
        output: the format of an operator's output.
        gradient: the format that an incoming gradient is rounded to before the two products of the backward pass.
        elsewhere: what an operator that cannot take this format runs in under a uniform plan.
    """

    name: str
    kind: Literal["float", "integer"]
    bits: int
    mantissa: int
    e_min: int
    max: float
    dtype: torch.dtype
    scaled: bool
    carrier: Precision
    output: Precision
    gradient: Precision
    elsewhere: Precision

    @property
    def eps(self) -> float:
        """The relative step `2**-mantissa` of a float format; the step of one level of an integer format."""
        return 2.0**-self.mantissa

    @property
    def plain(self) -> bool:
        """Whether a conversion to `dtype` is all that the format needs: no scale, and no rounding beyond the type's own."""
        return (
            not self.scaled
            and self.dtype.is_floating_point
            and torch.finfo(self.dtype).eps == self.eps
        )

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Precision) and self._content() == other._content()
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """What is copied or read from a pickle of a row of the table is that row, which passes compare by identity."""
        return (
            (precision, (self.name,))
            if FORMATS.get(self.name) is self
            else super().__reduce_ex__(protocol)
        )

    def _content(self) -> tuple[object, ...]:
        """What makes formats equal. Those that it refers to count by their names: a plain format refers to itself."""
        return tuple(
            fact.name if isinstance(fact, Precision) else fact for fact in vars(self).values()
        )


_Row: TypeAlias = tuple[
    str, Literal["float", "integer"], int, int, int, float, torch.dtype, bool, str, str, str, str
]
"""The fields of a `Precision`, with names of rows for formats."""

# fmt: off
_ROWS: tuple[_Row, ...] = (
    # name     kind       bits  k  e_min  max                     dtype                scaled carrier  output  gradient  elsewhere
    ("fp64",     "float",   64, 52, -1022, 1.7976931348623157e308, torch.float64,       False, "fp64", "fp64", "fp64",     "fp64"),
    ("fp32",     "float",   32, 23, -126,  3.4028234663852886e38,  torch.float32,       False, "fp32", "fp32", "fp32",     "fp32"),
    ("tf32",     "float",   19, 10, -126,  3.4011621342146535e38,  torch.float32,       False, "fp32", "fp32", "tf32",     "fp32"),
    ("bf16",     "float",   16,  7, -126,  3.3895313892515355e38,  torch.bfloat16,      False, "bf16", "bf16", "bf16",     "bf16"),
    ("fp16",     "float",   16, 10, -14,   65504.0,                torch.float16,       False, "fp16", "fp16", "fp16",     "fp16"),
    ("fp8",      "float",    8,  3, -6,    448.0,                  torch.float8_e4m3fn, True,  "bf16", "bf16", "fp8_e5m2", "bf16"),
    ("fp8_e5m2", "float",    8,  2, -14,   57344.0,                torch.float8_e5m2,   True,  "bf16", "bf16", "fp8_e5m2", "bf16"),
    ("int8",     "integer",  8,  0, 0,     127.0,                  torch.int8,          True,  "bf16", "bf16", "bf16",     "bf16"),
    ("int8_grad", "integer", 8,  0, 0,     127.0,                  torch.int8,          True,  "bf16", "bf16", "int8",     "bf16"),
)
# fmt: on


class _Table(Mapping[str, Precision]):
    """The formats by name. Read-only: a format is a row above."""

    def __init__(self, rows: tuple[_Row, ...]) -> None:
        self._rows = {row[0]: object.__new__(Precision) for row in rows}
        for row in rows:
            facts, others = row[:8], (self._rows[name] for name in row[8:])
            self._rows[row[0]].__init__(*facts, *others)  # type: ignore[misc]

    def __getitem__(self, name: str) -> Precision:
        return self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


FORMATS: Mapping[str, Precision] = _Table(_ROWS)

FP32 = FORMATS["fp32"]
"""The format of parameters, and of what no plan is for."""

_BY_DTYPE = {row.dtype: row for row in reversed(tuple(FORMATS.values())) if row.plain}


def precision(name: str | Precision) -> Precision:
    """Returns the format called `name`; raises `PrecisionError` naming the nearest one where there is none."""
    if isinstance(name, Precision):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise PrecisionError(f"{name!r} is not a precision", do=nearest(str(name), FORMATS))
    return FORMATS[name]


def precisions(names: Iterable[str | Precision]) -> list[Precision]:
    """Returns the formats called so, each once; raises `PrecisionError` for one that is none, and for a text in place of several."""
    if isinstance(names, str):
        raise PrecisionError(
            f"precisions are several, and {names!r} is a text", do=f"write precisions=[{names!r}]"
        )
    return list(dict.fromkeys(precision(name) for name in names))


@functools.cache
def encoding(row: Precision) -> Precision:
    """Returns the first format of the table that has the values of `row`: the name under which devices and kernels know it."""

    def values(fmt: Precision) -> tuple[object, ...]:
        return fmt.kind, fmt.mantissa, fmt.e_min, fmt.max, fmt.dtype

    return next((other for other in FORMATS.values() if values(other) == values(row)), row)


def precision_of(dtype: torch.dtype) -> Precision | None:
    """Returns the format that a plain tensor of `dtype` holds; None for integers, booleans and complex numbers."""
    return _BY_DTYPE.get(dtype)


def promoted(first: Precision, second: Precision) -> Precision:
    """Returns the narrowest plain format that holds both, by torch's own promotion (BF16 and FP16 give FP32)."""
    result = precision_of(torch.promote_types(first.dtype, second.dtype))
    if result is None:
        raise PrecisionError(
            f"no format holds both {first} and {second}",
            do="promote only formats of operator outputs",
        )
    return result
