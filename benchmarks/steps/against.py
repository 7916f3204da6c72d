"""Training steps and compilation of this checkout, compared with another checkout.

--before names the Python of an environment with the other checkout's package and native module, and
the same torch. Each checkout runs in its own process; the two run interleaved, step by step, in CPU
time with one thread. Equal models in two processes differ by up to 8%, because of their memory
placement: both processes use huge pages, and --processes repeats a case in new processes.
"seconds" is the median of this checkout, "to_before" the median over pairs of processes
("by_process") of the median ratio of adjacent runs, and "low" and "high" its bootstrap 95%
confidence interval. "compile" excludes the C++ compiler: Inductor's code is in the cache. Rows that
a run does not measure stay in the file of --json, with their dates.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import torch

if "--serve" not in sys.argv:  # this checkout's package would hide the other one
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.models import Case, bert, gpt2_block, perceptron, resnet, vgg16_bn, vit

# The other checkout may lack the current harness: code that its process runs must not use it.
CASES: dict[str, Callable[[], Case]] = {
    "two layers": perceptron,
    "BERT 2 layers, 8 x 128 tokens": lambda: bert(2, 8),
    "ResNet-18, 8 x 96 x 96": lambda: resnet(batch=8),
    "GPT-2 block, 2 x 256 tokens": lambda: gpt2_block(2),
    "VGG-16-BN, 8 x 64 x 64": lambda: vgg16_bn(8),
    "ViT 2 layers, 8 x 224 x 224": vit,
    "BERT-base, 2 x 64 tokens": lambda: bert(12, 2, 64),
    "ResNet-50, 2 x 64 x 64": lambda: resnet((3, 4, 6, 3), "bottleneck", 2, 64),
}
PRECISIONS = ("fp32", "bf16", "int8", "int8_grad")
COMPILE = "compile"
SHORTEST = 0.2
"""Minimum seconds of a run: steps of small models are repeated within it."""


def main() -> None:
    if "--serve" in sys.argv:
        serve()
        return
    from benchmarks.support.harness import (
        Row,
        arguments,
        by_size,
        selected,
        show,
        standing,
        write_json,
    )

    options = arguments(
        __doc__,
        before={"required": True, "type": Path, "help": "Python of the other checkout"},
        only={"help": "cases that begin so"},
        precisions={
            "nargs": "+",
            "choices": PRECISIONS,
            "default": PRECISIONS,
            "help": "all by default",
        },
        turns={"type": int, "default": 40, "help": "steps of each, a case (%(default)s)"},
        compiles={"type": int, "default": 6, "help": "compiles of each, a case (%(default)s)"},
        processes={"type": int, "default": 3, "help": "pairs of processes, a case (%(default)s)"},
    )
    rows: list[Row] = []
    pythons = {"now": Path(sys.executable), "before": options.before}
    cases = selected(options, by_size(options.quick, {"two layers": perceptron}, CASES))
    homes = {side: home(python) for side, python in pythons.items()}
    if homes["now"] == homes["before"]:
        raise SystemExit(
            f"both pythons import qsync_fx from {homes['now']}: use one with another checkout"
        )
    for name in cases:
        for precision in by_size(options.quick, PRECISIONS[1:2], options.precisions):
            counts = {COMPILE: options.compiles, "step": options.turns}
            if options.quick:
                counts = dict.fromkeys(counts, 2)
            times = measured(name, precision, pythons, counts, options.processes)
            for kind, pairs in times.items():
                row = {"case": name, "precision": precision, "what": kind, **median_ratio(pairs)}
                rows.append(row)
                print(row, flush=True)
            if options.json:
                done = {_row_key(row) for row in rows}
                other_rows = [
                    row
                    for row in standing(options.json, options.quick)
                    if _row_key(row) not in done
                ]
                write_json(
                    options.json,
                    [*other_rows, *rows],
                    quick=options.quick,
                    before=commit(homes["before"]),
                )
    show(rows)


def measured(
    name: str, precision: str, pythons: Mapping[str, Path], counts: Mapping[str, int], pairs: int
) -> dict[str, list[dict[str, list[float]]]]:
    """Return the seconds of each run by kind of run, pair of processes and checkout."""
    times: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in counts}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "benchmarks").symlink_to(Path(__file__).resolve().parents[1])
            both = {side: Served(python, Path(folder)) for side, python in pythons.items()}
            for served in both.values():
                served.ask(f"{name}\t{precision}")
            for kind, count in counts.items():
                times[kind].append(turns(both, kind, count))
            for served in both.values():
                served.end()
    return times


def _row_key(row: Mapping[str, object]) -> tuple[object, ...]:
    return row["case"], row["precision"], row["what"]


def home(python: Path) -> Path:
    """Return the package folder of an environment."""
    command = [str(python), "-P", "-c", "import qsync_fx; print(qsync_fx.__file__)"]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    return Path(completed.stdout.strip()).parent


def commit(package: Path) -> str | None:
    """Return the commit of a checkout; None outside a git repository."""
    command = ["git", "-C", str(package), "log", "-1", "--format=%h %s"]
    completed = subprocess.run(command, capture_output=True, text=True)
    return completed.stdout.strip() or None


class Served:
    """Process of one checkout, which runs requests and returns their seconds."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        # The folder makes `benchmarks` importable, but not this checkout's package. Both checkouts
        # share
        # Inductor's C++ cache, but no cached graphs (`compile_anew`).
        environment = {
            "PATH": "/usr/bin:/bin",
            "TORCHINDUCTOR_CACHE_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        command = [str(python), "-m", "benchmarks.steps.against", "--serve"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def ask(self, case: str) -> float:
        _stream(self.process.stdin).write(case + "\n")
        _stream(self.process.stdin).flush()
        answer = _stream(self.process.stdout).readline()
        if not answer:
            raise SystemExit(
                f"{self.python}: ended with {self.process.wait()} when asked for {case!r}"
            )
        return float(answer)

    def end(self) -> None:
        _stream(self.process.stdin).close()
        self.process.wait()


def _stream(of: IO[str] | None) -> IO[str]:
    assert of is not None
    return of


def turns(both: dict[str, Served], case: str, count: int) -> dict[str, list[float]]:
    """Return the seconds of each run by checkout; the order alternates."""
    times: dict[str, list[float]] = {side: [] for side in both}
    for served in both.values():
        served.ask(case)
    for turn in range(count):
        for side in list(both)[:: 1 if turn % 2 else -1]:
            times[side].append(both[side].ask(case))
    return times


def median_ratio(pairs: list[dict[str, list[float]]]) -> dict[str, object]:
    """Return the median ratio over pairs of processes, of the median ratio of adjacent runs."""
    draw = random.Random(0)
    ratios = [
        [now / before for now, before in zip(pair["now"], pair["before"], strict=True)]
        for pair in pairs
    ]
    medians = sorted(
        statistics.median(
            statistics.median(draw.choices(pair, k=len(pair)))
            for pair in draw.choices(ratios, k=len(ratios))
        )
        for _ in range(1000)
    )
    by_process = [statistics.median(pair) for pair in ratios]
    return {
        "seconds": statistics.median(seconds for pair in pairs for seconds in pair["now"]),
        "to_before": statistics.median(by_process),
        "low": medians[25],
        "high": medians[974],
        "by_process": by_process,
    }


def serve() -> None:
    """Serve requests by line: first case and precision, then runs."""
    torch.set_num_threads(1)
    # Library output must not appear on the answer stream.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, precision = sys.stdin.readline().rstrip("\n").split("\t")
    torch.manual_seed(0)
    case = CASES[name]()
    model = case.build("sdpa").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="qsync", options={"precision": precision})

    def steps(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            case.loss(compiled).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - begin) / count

    def compile_anew() -> float:
        torch._dynamo.reset()
        with torch._inductor.config.patch(fx_graph_cache=False):
            first = steps(1)
        return first - steps(1)

    answer(answers, steps(1))
    count = math.ceil(SHORTEST / steps(1))
    for line in sys.stdin:
        answer(answers, compile_anew() if line.strip() == COMPILE else steps(count))


def answer(to: IO[str], seconds: float) -> None:
    to.write(f"{seconds}\n")
    to.flush()


if __name__ == "__main__":
    main()
