"""Gradient buckets of DistributedDataParallel, equal to the lists of torch's `Reducer` (tested).

torch builds them twice. In the first iteration all gradients of a type are in one bucket, unless it
searches for unused parameters. It then rebuilds the buckets in the order in which gradients became
ready, with a limit of 1 MiB for the first bucket, for an early start, and 25 MiB for all others.
A bucket is full when it reaches its limit, so one large gradient can exceed it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from qsync_fx.errors import ProfileError

FIRST_BYTES: Final = 2**20
"""Limit of the first bucket: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""
BUCKET_BYTES: Final = 25 * 2**20
"""Limit of all other buckets: the default `bucket_cap_mb` of DistributedDataParallel."""


def ddp_buckets(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int] = 4,
    *,
    arrival: Sequence[int] | None = None,
    limits: Sequence[int] = (FIRST_BYTES, BUCKET_BYTES),
    types: Sequence[Hashable] | None = None,
    sparse: Collection[int] = (),
) -> list[list[int]]:
    """Return the parameters of each bucket from the second iteration on, in sending order.

    Args:
        numels: number of elements of each parameter, in registration order.
        dtype_bytes: bytes per element, for all parameters or for each.
        arrival: parameters in the order in which their gradients become ready; by default the
            reverse registration order. A parameter that is missing here receives no gradient.
        limits: size in bytes at which the first bucket is full, the second, and so on; the last
            limit applies to all further buckets. With `bucket_cap_mb` it is one limit for all.
        types: keys that separate gradients, such as dtype and device; default: bytes per element.
        sparse: parameters with sparse gradients, each in a bucket of its own.

    Raises:
        ProfileError: a size is negative, lists differ in length, or a parameter does not exist or
            arrives twice.
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
    """Return the parameters of each bucket in the first iteration.

    They apply to every iteration if torch searches for unused parameters. The arguments are the
    same as for `ddp_buckets`. Here limits apply in registration order, although the first bucket is
    sent last.
    """
    sizes, kinds = _checked(numels, dtype_bytes, types, limits)
    unlimited = (sum(sizes) + 1,)
    full, rest = _filled(
        range(len(sizes)), sizes, kinds, limits if find_unused_parameters else unlimited, sparse
    )
    return sorted(full + rest, key=min, reverse=True)


@dataclass
class _Filling:
    """Bucket of one type that is not yet full."""

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
    """Return the full buckets in the order of completion, and the remaining ones."""
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
    # torch stores them in a hash table. With few types its order starts with the last type.
    return full, [bucket.indices for bucket in reversed(filling.values()) if bucket.indices]


def _checked(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int],
    types: Sequence[Hashable] | None,
    limits: Sequence[int],
) -> tuple[list[int], Sequence[Hashable]]:
    """Return bytes and type of each parameter."""
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
