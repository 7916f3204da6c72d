"""Table of number formats.

A format is stored in `dtype`, a torch dtype that represents each of its values exactly; a *scaled*
format is stored as `q * scale`. Without a native unit, products are computed in the format
`carrier` (the compute dtype), in which all values are exact and products accumulate in FP32, so the
numerics do not change. Rows with equal values share units and kernels, under the name of the first
such row (`encoding`).

`int8` rounds incoming gradients to BF16, as QSync does (section IV-B). `int8_grad` also rounds them
to INT8, with one scale and by default stochastically: all three products are INT8 products, which
are faster on INT8 tensor cores, with noisier gradients.

Invariant: no other code lists formats one by one. Casts, lowering, promotion, costs and the command
line derive from the rows, so a new format is one new row.
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
    """Number format.

    Attributes:
        kind: "float", or "integer" for symmetric fixed point.
        bits: per value, which is also the size that a native kernel moves.
        mantissa: stored mantissa bits `k`; the relative step is `2**-k`. 0 for integers.
        e_min: exponent of the smallest normal number. 0 for integers.
        max: largest finite magnitude (float) or largest level (integer).
        dtype: torch dtype that stores it.
        scaled: whether a value is `q * scale`, with an FP32 scale per tensor or per channel.
        carrier: compute dtype of products on a device without a native unit.
        output: format of an operator's output.
        gradient: format that an incoming gradient is rounded to before the two products of the
            backward pass.
        elsewhere: format of operators that do not support this one, under a uniform plan.
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
        """Relative step `2**-mantissa` of a float format; 1 level for an integer format."""
        return 2.0**-self.mantissa

    @property
    def plain(self) -> bool:
        """Whether the format is a plain cast to `dtype`, without scale or further rounding."""
        if self.scaled or not self.dtype.is_floating_point:
            return False
        return torch.finfo(self.dtype).eps == self.eps

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Precision) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Copy and unpickle a row of the table as the same object: passes compare by identity."""
        if FORMATS.get(self.name) is self:
            return precision, (self.name,)
        return super().__reduce_ex__(protocol)

    def _content(self) -> tuple[object, ...]:
        """Return the fields for equality; a format is named, because it may refer to itself."""
        return tuple(getattr(field, "name", field) for field in vars(self).values())


_Row: TypeAlias = tuple[
    str, Literal["float", "integer"], int, int, int, float, torch.dtype, bool, str, str, str, str
]
"""Fields of a `Precision`, with names of rows instead of formats."""

# fmt: off
_ROWS: tuple[_Row, ...] = (
    # name, kind, bits, mantissa, e_min, max, dtype, scaled, carrier, output, gradient, elsewhere
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
    """Read-only mapping from names to formats; rows refer to formats by name."""

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
"""Format of parameters, and of operators without a planned format."""

_BY_DTYPE = {row.dtype: row for row in reversed(tuple(FORMATS.values())) if row.plain}


def precision(name: str | torch.dtype | Precision) -> Precision:
    """Return the format called `name`, in any case, or the first format of a dtype."""
    if isinstance(name, str) and name in FORMATS:  # first, for calls of kernels
        return FORMATS[name]
    if isinstance(name, Precision):
        return name
    if isinstance(name, torch.dtype):
        by_dtype = {row.dtype: row for row in reversed(tuple(FORMATS.values()))}
        if name in by_dtype:
            return by_dtype[name]
    elif isinstance(name, str) and name.lower() in FORMATS:
        return FORMATS[name.lower()]
    do = nearest(str(name)[:40].lower(), FORMATS)
    raise PrecisionError(f"{name!r} is not a precision", do=do)


def precisions(
    names: Iterable[str | torch.dtype | Precision] | str | torch.dtype | Precision,
) -> list[Precision]:
    """Return the formats with these names, or with one name, without duplicates."""
    if isinstance(names, str | torch.dtype | Precision):
        names = [names]
    return list(dict.fromkeys(precision(name) for name in names))


@functools.cache
def encoding(row: Precision) -> Precision:
    """Return the first format of the table with the values of `row`; kernels use its name."""

    def values(fmt: Precision) -> tuple[object, ...]:
        return fmt.kind, fmt.mantissa, fmt.e_min, fmt.max, fmt.dtype

    return next((other for other in FORMATS.values() if values(other) == values(row)), row)


def precision_of(dtype: torch.dtype) -> Precision | None:
    """Return the format of plain tensors of `dtype`; None unless it is a float dtype."""
    return _BY_DTYPE.get(dtype)


def promoted(first: Precision, second: Precision) -> Precision:
    """Return the narrowest plain format that represents both, by torch's promotion rules.

    BF16 and FP16 promote to FP32.
    """
    result = precision_of(torch.promote_types(first.dtype, second.dtype))
    if result is None:
        do = "promote only formats of operator outputs"
        raise PrecisionError(f"no format represents both {first} and {second}", do=do)
    return result
