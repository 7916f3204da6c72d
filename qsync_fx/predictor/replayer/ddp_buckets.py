"""Which gradients DistributedDataParallel sends together, and in which order.

Torch decides it twice. In the first iteration all gradients of a type travel in one bucket, unless unused parameters are looked for. Then
it builds buckets anew in the order in which gradients arrived: the first is full at 1 MiB, so that sending begins early, later ones at
25 MiB. A bucket is full once it holds its limit or more, so that one large gradient may exceed it.

Invariant: the same lists as torch's own `Reducer`; the tests ask it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from qsync_fx.errors import ProfileError

FIRST_BYTES: Final = 2**20
"""Limit of the first bucket: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""
BUCKET_BYTES: Final = 25 * 2**20
"""Limit of the others: `bucket_cap_mb` of DistributedDataParallel where nothing is given."""


def ddp_buckets(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int] = 4,
    *,
    arrival: Sequence[int] | None = None,
    limits: Sequence[int] = (FIRST_BYTES, BUCKET_BYTES),
    types: Sequence[Hashable] | None = None,
    sparse: Collection[int] = (),
) -> list[list[int]]:
    """Returns the parameters of each bucket from the second iteration on, in the order in which buckets are sent.

    Args:
        numels: elements of each parameter, in the order in which the model registers them.
        dtype_bytes: bytes of an element of all of them, or of each.
        arrival: parameters in the order in which their gradients are ready; the reverse of how they are registered where nothing is given.
            Those that are left out get no gradient.
        limits: bytes at which the first bucket is full, the second, and so on; the last one is that of all further ones.
            With `bucket_cap_mb` given to DistributedDataParallel it is one limit for all.
        types: what keeps gradients apart, such as type and device; the bytes of an element where nothing is given.
        sparse: parameters whose gradients are sparse, which travel alone.

    Raises:
        ProfileError: negative sizes, lists of different lengths, parameters that there are not or that arrive twice.
    """
    sizes, kinds = _checked(numels, dtype_bytes, types, limits)
    order = range(len(sizes))[::-1] if arrival is None else arrival
    unknown = next((index for index in (*order, *sparse) if index not in range(len(sizes))), None)
    if unknown is not None or len(set(order)) != len(order):
        message = (
            "a gradient arrives twice" if unknown is None else f"there is no parameter {unknown}"
        )
        raise ProfileError(
            message, where="arrival", do=f"name each of the {len(sizes)} parameters at most once"
        )
    full, rest = _filled(order, sizes, kinds, limits, sparse)
    return full + rest


def first_ddp_buckets(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int] = 4,
    *,
    find_unused_parameters: bool = False,
    limits: Sequence[int] = (FIRST_BYTES, BUCKET_BYTES),
    types: Sequence[Hashable] | None = None,
    sparse: Collection[int] = (),
) -> list[list[int]]:
    """Returns the parameters of each bucket in the first iteration, and in every one where unused parameters are looked for.

    The arguments are those of `ddp_buckets`. Here limits hold from the first parameter on, although its bucket is sent last.
    """
    sizes, kinds = _checked(numels, dtype_bytes, types, limits)
    unlimited = (sum(sizes) + 1,)
    full, rest = _filled(
        range(len(sizes)), sizes, kinds, limits if find_unused_parameters else unlimited, sparse
    )
    return sorted(full + rest, key=min, reverse=True)


@dataclass
class _Filling:
    """The bucket of one type that is being filled."""

    indices: list[int] = field(default_factory=list)
    size: int = 0
    done: int = 0


def _filled(
    order: Iterable[int],
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    limits: Sequence[int],
    sparse: Collection[int],
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the buckets that are full, in the order in which they were, and what is left."""
    filling: dict[Hashable, _Filling] = {}
    full: list[list[int]] = []
    for index in order:
        if index in sparse:
            full.append([index])
            continue
        bucket = filling.setdefault(kinds[index], _Filling())
        bucket.indices.append(index)
        bucket.size += sizes[index]
        if bucket.size >= limits[min(bucket.done, len(limits) - 1)]:
            full.append(bucket.indices)
            filling[kinds[index]] = _Filling(done=bucket.done + 1)
    # Torch keeps them in a hash table, whose order is that of the last type first, for the few types that there are.
    return full, [bucket.indices for bucket in reversed(filling.values()) if bucket.indices]


def _checked(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int],
    types: Sequence[Hashable] | None,
    limits: Sequence[int],
) -> tuple[list[int], Sequence[Hashable]]:
    """Returns bytes and kind of each parameter."""
    widths = [dtype_bytes] * len(numels) if isinstance(dtype_bytes, int) else list(dtype_bytes)
    kinds = widths if types is None else types
    for name, values in (("dtype_bytes", widths), ("types", kinds)):
        if len(values) != len(numels):
            message = f"{len(values)} {name} for {len(numels)} parameters"
            raise ProfileError(message, where=name, do="give one for each parameter")
    for name, least, values in (
        ("numels", 0, numels),
        ("dtype_bytes", 1, widths),
        ("limits", 1, limits),
    ):
        if (wrong := next((value for value in values if value < least), None)) is not None:
            raise ProfileError(
                f"{wrong} is less than {least}", where=name, do="give sizes as whole numbers"
            )
    if not limits:
        raise ProfileError(
            "there is no limit", where="limits", do="give the bytes at which a bucket is full"
        )
    return [numel * width for numel, width in zip(numels, widths, strict=True)], kinds
