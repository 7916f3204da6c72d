"""Header of a message between ranks, which identifies its bucket, step and codecs."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

_LAYOUT = struct.Struct("<4sIIIQQ")
MAGIC = b"QSC1"  # first bytes of each message of ours
HEADER = _LAYOUT.size


@dataclass(frozen=True)
class MessageHeader:
    """Header of a message, with the CRC-32 of the codecs that the ranks agree on."""

    codec: str
    sender: int
    bucket: int  # index and phase (reduce-scatter or all-gather)
    step: int
    length: int = 0  # bytes after the header

    def write(self, message: Tensor) -> None:
        packed = _LAYOUT.pack(MAGIC, *self._numbers().values())
        message[:HEADER] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def fault(self, message: Tensor) -> str | None:
        """Return how a received header differs from this one; None if it is equal."""
        magic, *received = _LAYOUT.unpack(bytes(message[:HEADER].numpy()))
        if magic != MAGIC:
            return f"it begins with {magic.hex()} instead of {MAGIC.hex()}"
        for (name, expected), value in zip(self._numbers().items(), received, strict=True):
            if value != expected:
                return f"its {name} is {value} instead of {expected}"
        return None

    def _numbers(self) -> dict[str, int]:
        return {**vars(self), "codec": zlib.crc32(self.codec.encode())}


def length_of(message: Tensor) -> int:
    """Return the length in the header of a message, in bytes."""
    return int(_LAYOUT.unpack(bytes(message[:HEADER].numpy()))[-1])
