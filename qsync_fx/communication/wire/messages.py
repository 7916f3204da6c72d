"""What stands before the bytes that ranks send each other, and what a receiver makes of it.

Invariant: a message that is not the one awaited, from another step, another bucket or another codec, is never decoded; who reads it says
in what it differs.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_LAYOUT = struct.Struct("<4sIIIQQ")
_MAGIC = b"QSC1"
HEADER = _LAYOUT.size


@dataclass(frozen=True)
class Head:
    """Attributes:
    codec: a hash of what the ranks have agreed on.
    sender: a rank.
    bucket, step: what the values are of; a bucket also says which of its two exchanges.
    length: bytes after the header.
    """

    codec: int
    sender: int
    bucket: int
    step: int
    length: int

    def write(self, message: Tensor) -> None:
        packed = _LAYOUT.pack(_MAGIC, self.codec, self.sender, self.bucket, self.step, self.length)
        message[:HEADER] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def fault(self, message: Tensor) -> str | None:
        """Returns in what the header of a message differs from this one; None where it does not."""
        magic, *found = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))
        if magic != _MAGIC:
            return f"it begins with {magic.hex()} in place of {_MAGIC.hex()}"
        for field, value in zip(fields(self), found, strict=True):
            if value != (expected := getattr(self, field.name)):
                return f"its {field.name} is {value} in place of {expected}"
        return None


def length_of(message: Tensor) -> int:
    """Returns how many bytes a message says that it has."""
    length: int = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))[-1]
    return length


def unread(rank: int, sender: int, about: str, fault: str) -> str:
    """Returns what a rank tells of a message that it could not read."""
    return f"rank {rank} cannot read what rank {sender} sent of {about}: {fault}"


def hash_of(text: str) -> int:
    """Returns 32 bits that tell texts apart."""
    return zlib.crc32(text.encode())
