"""Training steps with and without transparent huge pages on Linux, for qsync and Inductor.
glibc requests huge pages if GLIBC_TUNABLES is set before a process starts, so each variant is a
process, and the two run interleaved. "without_ms" and "huge_pages_ms" are medians, and "ratio" is
the median of the ratios of each round. A copy of 16 MiB is measured for comparison. With --threads
1 the clock counts CPU time of the process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from qsync_fx.devices.machine import SWITCH, huge_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import CASES, QUICK, Case
from benchmarks.support.harness import Row, arguments, by_size, clock_for, finish, selected

WAYS: dict[str, dict[str, object]] = {
    "Inductor, autocast in BF16": {"backend": "inductor"},
    "qsync, bf16": {"backend": "qsync", "options": {"precision": "bf16"}},
    "qsync, int8_grad": {"backend": "qsync", "options": {"precision": "int8_grad"}},
}
COPY = 2**22


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--steps":
        print(json.dumps(seconds(**json.loads(sys.argv[2]))))
        return
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet, vgg"},
        turns={"type": int, "default": 5, "help": "processes of each variant (%(default)s)"},
    )
    if not huge_pages().missing:
        raise SystemExit(f"huge pages cannot be compared on this machine: {huge_pages()}")
    rows: list[Row] = []
    for name in selected(options, by_size(options.quick, QUICK, CASES)):
        job = {
            "name": name,
            "quick": options.quick,
            "threads": options.threads,
            "steps": by_size(options.quick, 2, 20),
        }
        turns = [
            (measured(job), measured(job, huge=True))
            for _ in range(by_size(options.quick, 1, options.turns))
        ]
        for variant in turns[0][0]:
            without, with_them = ([turn[index][variant] for turn in turns] for index in (0, 1))
            rows.append(
                {
                    "case": name,
                    "method": variant,
                    "without_ms": 1e3 * statistics.median(without),
                    "huge_pages_ms": 1e3 * statistics.median(with_them),
                    "ratio": statistics.median(
                        b / a for a, b in zip(without, with_them, strict=True)
                    ),
                    "turns": len(turns),
                }
            )
    finish(options, rows)


def measured(job: dict[str, object], huge: bool = False) -> dict[str, float]:
    """Return the seconds of each case, measured in a new process."""
    name, _, value = SWITCH.partition("=")
    environment = dict(os.environ)
    if huge:
        environment[name] = value
    command = [sys.executable, __file__, "--steps", json.dumps(job)]
    text = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    times: dict[str, float] = json.loads(text.splitlines()[-1])
    return times


def seconds(name: str, quick: bool, threads: int, steps: int) -> dict[str, float]:
    """Return the median seconds of a step of each variant and of a copy, measured interleaved."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    source = torch.randn(COPY)
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {"copy of 16 MiB": lambda: target.copy_(source)}
    for variant, options in WAYS.items():
        runs[variant] = training((by_size(quick, QUICK, CASES))[name](), options)
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    clock = clock_for(threads)
    for index in range(-2, steps):
        for variant, run in runs.items():
            begin = clock()
            run()
            if index >= 0:
                times[variant].append(clock() - begin)
    return {variant: statistics.median(each) for variant, each in times.items()}


def training(case: Case, options: dict[str, object]) -> Callable[[], None]:
    """Return a step of a case, compiled with the arguments `given`."""
    compiled = torch.compile(case.model, dynamic=False, **options)  # type: ignore[call-overload]

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=options["backend"] == "inductor"):
            loss = case.step(compiled, case.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        case.optimizer.step()
        case.optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
