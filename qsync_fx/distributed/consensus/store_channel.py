"""What ranks tell each other beside collectives: small texts in the store that torch.distributed was started with.

Invariant: no call waits for another rank. A store whose process has ended raises `StoreLost`, and nothing else does.
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
    """The store does not answer."""


@dataclass(frozen=True)
class Failure:
    """What is wrong on a rank, as all ranks are told it.

    Attributes:
        rank: whose failure it is; None where that is not known.
        what, where, do: as of an error.
        lives: whether the rank can still be told anything.
    """

    rank: int | None
    what: str
    where: str | None = None
    do: str | None = None
    lives: bool = True

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Returns what the others are told of an error that ends training on `rank`."""
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
            do=self.do or "mend what failed there, and start all ranks again",
        )
        result.rank = self.rank
        return result


class Channel:
    """One conversation of all ranks.

    Attributes:
        rank, world: this rank's number, of how many.
    """

    _begun = 0

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Ranks begin the same conversations in the same order. A connection of its own is not held up by whoever waits at another.
        Channel._begun += 1
        store: Any = distributed_c10d._get_default_store()
        self._store: Any = distributed_c10d.PrefixStore(f"qsync/{Channel._begun}", store.clone())

    def put(self, key: str, text: str) -> None:
        packed = zlib.compress(text.encode())
        self._ask(lambda: self._store.set(key, packed.hex()))

    def has(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])))

    def get(self, key: str) -> str | None:
        """Returns the text of a key; None where none has been put yet."""
        if not self.has(key):
            return None
        packed: bytes = self._ask(lambda: self._store.get(key))
        return zlib.decompress(bytes.fromhex(packed.decode())).decode()

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter that all ranks share, and returns it."""
        return self._ask(lambda: int(self._store.add(key, more)))

    def tell(self, failure: Failure) -> None:
        """Tells all ranks."""
        index = self.count("failures", 1)
        self.put(f"failure/{index}", json.dumps(asdict(failure)))

    def told(self) -> Failure | None:
        """Returns what was told first; None where nothing was."""
        text = self.get("failure/1")
        return None if text is None else Failure(**json.loads(text))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        # torch raises DistError, which is a RuntimeError, or one without a class of its own, by the kind of store.
        except (RuntimeError, OSError) as error:
            raise StoreLost(str(error)) from error
