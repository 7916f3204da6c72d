"""Agreement of ranks at the end of a step: faults, digests of results, and whether all are finite.

Invariant: either all ranks use the gradients of a step, or all raise the same error.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.communication.message_header import MAGIC
from qsync_fx.communication.point_to_point import exchange, rank_error

GRADIENTS: Final = "the averaged gradients of rank {} differ from those of rank {}"
_OUTCOME = struct.Struct("<4s?I")
_OUTCOME_BYTES = 512


@dataclass
class StepOutcome:
    """Outcome of a step on one rank, which all ranks exchange."""

    faults: list[str] = field(default_factory=list)  # the first is sent, cut to 500 bytes
    digest: int = 0  # CRC-32 of the results that ranks compare
    finite: bool = True

    def packed(self) -> Tensor:
        text = "".join(self.faults[:1]).encode()
        packed = _OUTCOME.pack(MAGIC, self.finite, self.digest) + text
        fixed = packed[:_OUTCOME_BYTES].ljust(_OUTCOME_BYTES, b"\0")
        return torch.frombuffer(bytearray(fixed), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, message: Tensor) -> StepOutcome:
        content = bytes(message.numpy())
        magic, finite, digest = _OUTCOME.unpack_from(content)
        if magic != MAGIC:
            return cls(["the message of a rank at the end of a step cannot be read"])
        # The cut may fall within a character.
        text = content[_OUTCOME.size :].rstrip(b"\0").decode(errors="ignore")
        return cls(list(filter(None, [text])), digest, finite)


def settle(
    group: Any, rank: int, world: int, step: int, outcome: StepOutcome, reported: str = GRADIENTS
) -> bool:
    """Exchange the outcome of a step; return whether all ranks have finite gradients.

    Raise `RankError` on all ranks if one cannot read a message, or, as `reported`, digests differ.
    """
    mine = outcome.packed()
    messages = {peer: torch.empty_like(mine) for peer in range(world) if peer != rank}
    exchange(group, dict.fromkeys(messages, mine), messages, f"the end of step {step}")
    messages[rank] = mine
    outcomes = [StepOutcome.unpacked(messages[sender]) for sender in range(world)]
    for sender, item in enumerate(outcomes):
        if item.faults:
            where = f"the end of step {step}, on all ranks"
            do = "check the version on all ranks and the network; resume from the last checkpoint"
            raise rank_error(sender, item.faults[0], where, do)
    digests = [item.digest for item in outcomes]
    usual, count = Counter(digests).most_common(1)[0]
    if count != world:
        other = next(sender for sender in range(world) if digests[sender] != usual)
        description = f"{reported.format(other, digests.index(usual))}; they must be bit-identical"
        do = "resume from the last checkpoint; if it recurs, suspect qsync_fx or a faulty processor"
        raise rank_error(other, description, f"step {step}", do)
    return all(item.finite for item in outcomes)
