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
        rank: the failed rank; None if it is unknown.
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
        if isinstance(error, QSyncError):
            return cls(
                rank,
                f"rank {rank} has failed: {type(error).__name__}: {error.what}",
                error.where,
                error.do,
            )
        text = str(error).strip()[:_LONGEST]
        return cls(
            rank, f"rank {rank} has failed: {type(error).__name__}{': ' + text if text else ''}"
        )

    def error(self) -> RankError:
        result = RankError(
            self.what,
            where=self.where,
            do=self.do or "correct the error on that rank, and restart all ranks",
        )
        result.rank = self.rank
        return result


class Channel:
    """Message channel of all ranks, under a prefix of the store.

    Attributes:
        rank, world: rank of this process, and number of ranks.
    """

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

    def has(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])))

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is not set yet."""
        if not self.has(key):
            return None
        packed: bytes = self._ask(lambda: self._store.get(key))
        return zlib.decompress(bytes.fromhex(packed.decode())).decode()

    def count(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter that all ranks share, and return the sum."""
        return self._ask(lambda: int(self._store.add(key, more)))

    def tell(self, failure: Failure) -> None:
        index = self.count("failures", 1)
        self.put(f"failure/{index}", json.dumps(asdict(failure)))

    def told(self) -> Failure | None:
        """Return the first reported failure; None without one."""
        text = self.get("failure/1")
        return None if text is None else Failure(**json.loads(text))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        # torch raises DistError (a RuntimeError) or a plain RuntimeError, depending on the store.
        except (RuntimeError, OSError) as error:
            raise StoreLost(str(error)) from error
