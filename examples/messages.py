"""Messages between the launcher and the ranks.

Invariant: messages are plain values, and the launcher needs no other interface to a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WORLD = 2
WARM_UP = 5
"""Number of steps without timing.

The first compiles, DDP then rebuilds its buckets, and two steps measure memory.
"""

ROLES = ("training", "inference")
"""Device class of each rank."""
FORMATS = (("fp32",), ("fp32", "bf16"))
"""Formats that each device class may use.

INT8 is excluded: a CPU computes INT8 convolutions in BF16, so that it only adds quantization.
"""
RUNS = ("uniform", "planned")
"""Interleaved trainings: inference rank uniformly in its narrowest format, and with the plan."""
KNOBS = ("uniform bf16", "formats only", "batches only", "both: the plan")
"""Plans that are compared by their predictions; "uniform" and "formats" have the given batches."""


@dataclass(frozen=True)
class Job:
    """Job of a rank.

    Attributes:
        rank: index of the rank.
        source, samples: of the images; None for the default source, and for all images.
        epochs, batches: number of epochs, and images per step of each rank.
        small: whether to use a smaller network.
        rounds: runs of each plan in the profile.
        memory: limit of the inference rank's peak memory in bytes; None for the default.
        joint: whether the plan also chooses the batches.
        plan_path: file of a plan to use without measuring; None to solve for a plan.
        inner_backend: backend that compiles the rewritten graphs.
        seed, output, rendezvous: random seed, output folder, and file of the process group's store.
        width: columns of the terminal.
    """

    rank: int
    source: str | None
    samples: int | None
    epochs: int
    batches: tuple[int, int]
    small: bool
    rounds: int
    memory: float | None
    joint: bool
    plan_path: Path | None
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
    """Phase of a rank before the training; `steps` counts the measured steps."""

    text: str
    steps: int = 0


@dataclass(frozen=True)
class Prediction:
    """Prediction of a training.

    Attributes:
        seconds: duration of a step of both ranks.
        computing, waiting: seconds per step of each rank; waiting includes gradient transfer.
        peak: peak memory of each rank in bytes.
        variance: variance of the mean gradient that is added by rounding.
    """

    seconds: float
    computing: tuple[float, ...]
    waiting: tuple[float, ...]
    peak: tuple[int, ...]
    variance: float


Choice = tuple[Prediction, tuple[int, ...]]
"""Prediction of a plan, and the images per step of each rank."""


@dataclass(frozen=True)
class PlanMessage:
    """Plan that the ranks found, with the prediction of each training by name.

    Attributes:
        answer: report of the plan.
        memory: limit of the inference rank's peak memory in bytes.
        knobs: prediction of each plan of `KNOBS`, with its batches; None without a plan that fits
            into memory. Empty if only formats are planned.
    """

    answer: str
    memory: float
    predicted: dict[str, Prediction]
    knobs: dict[str, Choice | None]


@dataclass(frozen=True)
class Step:
    """Completed step; `loss` is the mean since the start of the epoch."""

    run: str
    epoch: int
    step: int
    loss: float


@dataclass(frozen=True)
class Epoch:
    """Completed epoch; `correct` counts correct test images in FP32, on the rank that evaluates."""

    run: str
    epoch: int
    loss: float
    correct: int | None


@dataclass(frozen=True)
class Ran:
    """Result of a training on a rank.

    Attributes:
        batch: images per step.
        operators: number of adjustable operators compiled in each precision.
        graphs: number of compiled graphs, one per DDP bucket.
        unexplained: operators whose compiled precision differs from the explained one.
        took: median seconds of a step by name: "seconds" of the full step, "computing", "waiting"
            for all-reduce, "processor", the CPU time of computing, and "noise", the variation
            of "seconds" between parts of the training; None after too few steps.
        timed: number of steps in these medians.
        peak: peak memory of a step in bytes; None after too few steps.
        digest: SHA-256 over all parameters and buffers.
        correct: correct test images at the end, on the rank that evaluates.
    """

    batch: int
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
    """Results of both trainings on a rank, by name."""

    runs: dict[str, Ran]
    parameters: int


@dataclass(frozen=True)
class Failed:
    """Error of a rank. `time_s` is time.monotonic(), which all processes of a machine share."""

    text: str
    expected: bool
    time_s: float
