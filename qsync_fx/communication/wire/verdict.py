"""What ranks tell each other at the end of a step: whether all messages could be read, whether gradients
are finite, and, now and then, a hash of what they made.

Invariant: either all ranks go on, or all raise the same error.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

import torch

from qsync_fx.communication.wire.exchange import exchange
from qsync_fx.errors import RankError

_SIZE = 512
GRADIENTS: Final = "the gradients of rank {} are not those of rank {} after they were averaged"


def settle(
    group: Any,
    rank: int,
    world: int,
    step: int,
    faults: list[str],
    digest: int,
    finite: bool = True,
    told: str = GRADIENTS,
) -> bool:
    """Returns, once all ranks have said that they could read everything, and have the same digest, whether all have finite gradients.

    Args:
        told: what is said of two ranks where the digest of the first is another.

    Raises:
        RankError: on all ranks, if one could not, or has another.
    """
    # What is told is cut as a text, as bytes of it may end within a letter.
    mine = _packed({"fault": faults[0][:300] if faults else None, "digest": digest, "finite": finite})
    peers = [peer for peer in range(world) if peer != rank]
    theirs = {peer: torch.empty(_SIZE, dtype=torch.uint8) for peer in peers}
    exchange(group, dict.fromkeys(peers, mine), theirs, f"the end of step {step}")
    said = {peer: _unpacked(message) for peer, message in theirs.items()}
    said[rank] = _unpacked(mine)
    for sender in range(world):
        if (fault := said[sender]["fault"]) is not None:
            error = RankError(
                fault,
                where=f"the end of step {step}, on all ranks",
                do="see that all ranks run the same version, and that the network is sound; go on from the last checkpoint",
            )
            error.rank = sender
            raise error
    digests = [said[sender]["digest"] for sender in range(world)]
    usual, count = Counter(digests).most_common(1)[0]
    if count != world:
        other = next(sender for sender in range(world) if digests[sender] != usual)
        error = RankError(
            f"{told.format(other, digests.index(usual))}, to the last bit",
            where=f"step {step}",
            do="go on from the last checkpoint; if it comes again, it is a bug in qsync_fx or a processor that errs",
        )
        error.rank = other
        raise error
    return all(said[sender]["finite"] for sender in range(world))


def _packed(value: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(value, ensure_ascii=True).encode()[:_SIZE]
    return torch.frombuffer(bytearray(text.ljust(_SIZE)), dtype=torch.uint8)


def _unpacked(message: torch.Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(message.numpy()))
    except ValueError:
        return {"fault": "what a rank told at the end of a step cannot be read", "digest": 0, "finite": True}
    return (
        found if isinstance(found, dict) else {"fault": "what a rank told is no verdict", "digest": 0, "finite": True}
    )
