"""What the launcher tells a rank, and what a rank tells the launcher.

Invariant: plain values, which both sides import from here; the launcher needs nothing else of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORLD = 2
WARM_UP = 5
"""Steps that no time is taken of: the first compiles, and DDP rearranges its buckets after it."""


@dataclass(frozen=True)
class Job:
    """What a rank is to do; `samples` None is all of them. Its plan lies in the output folder."""

    rank: int
    source: str | None
    samples: int | None
    epochs: int
    batch: int
    inner: str
    seed: int
    output: Path
    rendezvous: Path

    @property
    def plan(self) -> Path:
        return self.output / f"plan-rank{self.rank}.json"

    @property
    def log(self) -> Path:
        return self.output / f"rank{self.rank}.log"


@dataclass(frozen=True)
class Phase:
    """What the rank is doing, before it trains."""

    text: str


@dataclass(frozen=True)
class Step:
    """A step is done; `loss` is the mean since the epoch began."""

    epoch: int
    step: int
    loss: float


@dataclass(frozen=True)
class Epoch:
    """An epoch is done; the test images that the FP32 weights get right, where the rank has evaluated them."""

    epoch: int
    loss: float
    correct: int | None


@dataclass(frozen=True)
class Result:
    """How it went.

    Attributes:
        operators: how many adjustable operators were compiled in each precision.
        graphs: the graphs that were compiled, one for each of DDP's buckets.
        unexplained: operators whose compiled precision is not the one that was explained.
        compute, waiting: median seconds of a step without, and in, the wait for all-reduce; None after too few steps.
        timed: the steps that these are medians of.
        digest: SHA-256 over every parameter and buffer.
    """

    operators: dict[str, int]
    graphs: int
    unexplained: list[str]
    compute: float | None
    waiting: float | None
    timed: int
    digest: str
    parameters: int
    correct: int | None


@dataclass(frozen=True)
class Failed:
    """The rank could not go on. `at` is time.monotonic(), which all processes of a machine share."""

    text: str
    expected: bool
    at: float
