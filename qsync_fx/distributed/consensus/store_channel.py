"""Messages between ranks through the key-value store of torch.distributed.

Invariant: no call waits for another rank, and no call raises anything but `StoreLost`, if the
process of the store has ended.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

from qsync_fx.errors import QSyncError, RankError

T = TypeVar("T")
_LONGEST = 20_000


class StoreLost(Exception):
    """The store does not respond."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, as it is reported to all ranks.

    Attributes:
        what, where, do: as of an error.
        lives: whether the process of the rank can still receive reports.
    """

    rank: int | None
    what: str
    where: str | None = None
    do: str | None = None
    lives: bool = True

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the failure that an error on `rank` causes."""
        text = f"rank {rank} has failed: {type(error).__name__}"
        if isinstance(error, QSyncError):
            return cls(rank, f"{text}: {error.what}", error.where, error.do)
        if reason := str(error).strip()[:_LONGEST]:
            text += f": {reason}"
        return cls(rank, text)

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def error(self) -> RankError:
        do = self.do or "correct the error on that rank, and restart all ranks"
        result = RankError(self.what, where=self.where, do=do)
        result.rank = self.rank
        return result


class Channel:
    """Message channel of all ranks, under a prefix of the store."""

    _begun = 0

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Ranks create channels in the same order, so the counter names the same channel on each. A
        # cloned store has its own connection, which no other thread blocks.
        Channel._begun += 1
        store: Any = distributed_c10d._get_default_store()
        self._store: Any = distributed_c10d.PrefixStore(f"qsync/{Channel._begun}", store.clone())

    def put(self, key: str, text: str) -> None:
        packed = zlib.compress(text.encode())
        self._ask(lambda: self._store.set(key, packed.hex()))

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is not set yet."""
        if not self._ask(lambda: bool(self._store.check([key]))):
            return None
        packed: bytes = self._ask(lambda: self._store.get(key))
        return zlib.decompress(bytes.fromhex(packed.decode())).decode()

    def count(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter that all ranks share, and return the sum."""
        return self._ask(lambda: int(self._store.add(key, more)))

    def tell(self, failure: Failure) -> None:
        index = self.count("failures", 1)
        self.put(f"failure/{index}", failure.to_json())

    def told(self) -> Failure | None:
        """Return the first reported failure; None without one."""
        text = self.get("failure/1")
        return None if text is None else Failure.from_json(text)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        # torch raises DistError (a RuntimeError) or a plain RuntimeError, depending on the store.
        except (RuntimeError, OSError) as error:
            raise StoreLost(str(error)) from error
