"""Compile the kernels that GPU tests run, most important first, within a time limit.

    python tests/gpu/build_kernels.py --arch sm_90a --jobs 16 --seconds 420
        --json runs/gpu/kernels.json

First come units of models and quantizers and one kernel of each kind, as `qsync kernels build`
compiles them; then one more of each kind per round. Compiled units stay in the cache, and the next
run reuses them. Tests of other units are skipped, and the summary counts them. The status is 1 if a
kernel failed to compile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch, KernelConfig
from qsync_fx.backend.cuda.selection import candidates, select
from qsync_fx.serialization.atomic_files import write_text
from tests.gpu import kit, models, test_gemm, test_memory, test_wrapper


class Over(BaseException):
    """Time limit reached. Not an Exception, so that no handler treats it as a compiler error."""


def ordered(arch: Arch) -> list[TranslationUnit]:
    """Return all units of an architecture, most important first."""
    kinds: dict[tuple[object, ...], list[KernelConfig]] = defaultdict(list)
    for config in candidates.all_configs(arch):
        kinds[config.operation, config.a, config.b, config.a_major, config.b_major].append(config)
    longest = max(map(len, kinds.values()))
    rounds = [
        kind[index] for index in range(longest) for kind in kinds.values() if index < len(kind)
    ]
    called = models.kernels_of(
        [*test_wrapper.asked(), *test_gemm.asked(), *test_memory.asked()], arch
    )
    return list(
        dict.fromkeys(
            [
                *models.units(arch),
                *called,
                *select.of_all(arch),
                *map(codegen.unit_of, rounds),
            ]
        )
    )


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Over` in the body after so many seconds; 0 means no limit."""

    def over(number: int, frame: FrameType | None) -> None:
        raise Over

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        default=kit.arch(),
        help="what to compile for (%(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="compilers at once; as cores and memory allow by default",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="when to stop; 0: when all is done"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only units whose name holds this"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the units, in order, and compile nothing"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was done there")
    options = parser.parse_args()
    wanted = [unit for unit in ordered(options.arch) if options.only in unit.name]
    if options.list:
        print("\n".join(unit.name for unit in wanted))
        return 0
    since, failures = time.monotonic(), {}
    try:
        with at_most(options.seconds):
            failures = compiler.attempt(wanted, jobs=options.jobs).failures
    except Over:
        print("build_kernels: the time is over", file=sys.stderr)
    done = [unit for unit in wanted if kit.compiled(unit)]
    report: dict[str, Any] = {
        "arch": options.arch,
        "wanted": len(wanted),
        "compiled": len(done),
        "seconds": round(time.monotonic() - since, 1),
        "left": [unit.name for unit in wanted if unit not in done and unit not in failures],
        "failures": {unit.name: str(error) for unit, error in failures.items()},
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.json, json.dumps(report, indent=1) + "\n")
    print(
        f"build_kernels: {len(done)} of {len(wanted)} kernels for {options.arch}, "
        f"{report['seconds']:.0f} s"
    )
    for name, error in report["failures"].items():
        print(f"{name}: {error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
