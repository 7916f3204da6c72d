"""What the launcher tells a rank, and what a rank tells the launcher.

Invariant: plain values, which both sides import from here; the launcher needs nothing else of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORLD = 2
WARM_UP = 5
"""Steps that no time is taken of: the first compiles, DDP rearranges its buckets after it, and in two of them memory is measured."""

ROLES = ("training", "inference")
"""What the classes of devices of the two ranks are called, by rank."""
FORMATS = (("fp32",), ("fp32", "bf16"))
"""What each of them may be planned in. INT8 is left out: a CPU computes INT8 convolutions in BF16, so that it only adds quantizers."""
RUNS = ("uniform", "planned")
"""What is trained: the inference rank in its narrowest format alone, and under the plan. They take turns, epoch by epoch."""


@dataclass(frozen=True)
class Job:
    """What a rank is to do.

    Attributes:
        rank: its number.
        source, samples: of the images; None for the default, and for all of them.
        epochs, batches: how long to train, and the images of each rank in a step.
        small: whether the network is a smaller one.
        rounds: how many turns each plan of a profile has.
        memory: bytes that a step of the inference rank may hold; None for a share of what FP32 takes.
        given: a plan that is trained under without a profile; None to find one.
        inner_backend: what compiles the rewritten graphs.
        seed, output, rendezvous: of random numbers; the folder for what is made; the file that the ranks meet in.
        width: of the screen.
    """

    rank: int
    source: str | None
    samples: int | None
    epochs: int
    batches: tuple[int, int]
    small: bool
    rounds: int
    memory: float | None
    given: Path | None
    inner_backend: str
    seed: int
    output: Path
    rendezvous: Path
    width: int

    @property
    def role(self) -> str:
        return ROLES[self.rank]

    @property
    def plan(self) -> Path:
        return self.output / "plan.json"

    @property
    def log(self) -> Path:
        return self.output / f"rank{self.rank}.log"

    def profile(self, role: str) -> Path:
        return self.output / f"profile-{role}.json"

    def timeline(self, run: str) -> Path:
        return self.output / f"timeline-{run}.json"


@dataclass(frozen=True)
class Phase:
    """What the rank is doing, before it trains; where it measures, after so many steps."""

    text: str
    steps: int = 0


@dataclass(frozen=True)
class Foreseen:
    """What is foreseen of a run.

    Attributes:
        seconds: of a step of both ranks.
        computing, waiting: seconds of each rank in it; waiting is for the other rank and for gradients to travel.
        peak: the most bytes that a step of each rank holds.
        variance: what roundings add to that of the mean gradient.
    """

    seconds: float
    computing: tuple[float, ...]
    waiting: tuple[float, ...]
    peak: tuple[int, ...]
    variance: float


@dataclass(frozen=True)
class Planned:
    """A plan was found.

    Attributes:
        answer: what is said of it.
        memory: the most bytes that a step of the inference rank may hold.
        foreseen: each run, by its name.
    """

    answer: str
    memory: float
    foreseen: dict[str, Foreseen]


@dataclass(frozen=True)
class Step:
    """A step is done; `loss` is the mean since the epoch began."""

    run: str
    epoch: int
    step: int
    loss: float


@dataclass(frozen=True)
class Epoch:
    """An epoch is done; the test images that the FP32 weights get right, where the rank has evaluated them."""

    run: str
    epoch: int
    loss: float
    correct: int | None


@dataclass(frozen=True)
class Ran:
    """How a run went on a rank.

    Attributes:
        operators: how many adjustable operators were compiled in each precision.
        graphs: the graphs that were compiled, one for each of DDP's buckets.
        unexplained: operators whose compiled precision is not the one that was explained.
        took: medians of a step, by name: "seconds" of all of it, "computing" without, and "waiting" in, the wait for all-reduce, and
            "processor", what the processor's clock says of computing; None after too few steps.
        timed: the steps that these are medians of.
        peak: the most bytes that a step held; None after too few steps.
        digest: SHA-256 over every parameter and buffer.
        correct: the test images that are right at the end, where the rank has evaluated them.
    """

    operators: dict[str, int]
    graphs: int
    unexplained: list[str]
    took: dict[str, float] | None
    timed: int
    peak: int | None
    digest: str
    correct: int | None


@dataclass(frozen=True)
class Result:
    """How both runs went on a rank, by their names."""

    runs: dict[str, Ran]
    parameters: int


@dataclass(frozen=True)
class Failed:
    """The rank could not go on. `at` is time.monotonic(), which all processes of a machine share."""

    text: str
    expected: bool
    at: float
