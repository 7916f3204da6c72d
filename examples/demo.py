"""Trains a small ResNet on two unequal ranks, each under its own plan.

Rank 0 computes in FP32, as a training GPU would. Rank 1 computes in INT8 with
some operators recovered to higher precision, as an inference GPU would; its
plan is a file, which you may replace by --plan. Both keep FP32 weights, and
average their gradients over torch.distributed in every step.

Invariant: the exit code is 0 if and only if the training went through, what was compiled is what was explained, and the weights of
both ranks are equal to the last bit.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

RECOVERED = (("stem", "fp32"), ("**.shortcut", "bf16"), ("head", "fp32"))
"""The first and the last layer decide most of the loss, and shortcuts carry the signal past the blocks; all are cheap."""


def main() -> int:
    args = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        _require_packages()
        return _report(args)
    except KeyboardInterrupt:
        print("demo: interrupted, and both processes have ended", file=sys.stderr)
        return 130


def _report(args: argparse.Namespace) -> int:
    """Runs the demo and prints whatever is wrong with its arguments."""
    from rich.console import Console

    from qsync_fx import QSyncError

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return _run(args, console, errors)
    except QSyncError as error:
        errors.print("[bold red]demo:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2


def _arguments() -> argparse.Namespace:
    description = (__doc__ or "").partition("Invariant")[0].rstrip()
    parser = argparse.ArgumentParser(
        prog="demo.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=_positive, metavar="N", help="default: 3, digits 20")
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="images a step on each rank; default: 128, digits 32"
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a folder with the four files of MNIST's format (.gz or not), or the word digits; default: Fashion-MNIST where "
        "Debian's dataset-fashion-mnist is installed, else scikit-learn's digits",
    )
    parser.add_argument(
        "--samples", type=_positive, metavar="N", help="train on so many images, drawn at random; default: all"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="PATH", help="the plan of rank 1; default: INT8, and " + _recovered()
    )
    parser.add_argument(
        "--inner",
        choices=("inductor", "aot_eager", "eager"),
        default="aot_eager",
        help="what compiles the rewritten graphs; default: aot_eager, with which training starts half a minute sooner than with inductor",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="the same seed gives the same weights; default: 0"
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="folder for plans and explanations; default: runs/demo-DATE-TIME"
    )
    return parser.parse_args()


def _recovered() -> str:
    return ", ".join(f"{pattern.replace('%', '%%')} {fmt}" for pattern, fmt in RECOVERED)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 999999999")
    return int(text)


def _require_packages() -> None:
    try:
        import rich  # noqa: F401
        import torch  # noqa: F401

        import qsync_fx  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"demo: {error.name} is not installed for {sys.executable}\n  do:    run `make setup`, then `make demo` or "
            "`.venv/bin/python examples/demo.py`",
            file=sys.stderr,
        )
        sys.exit(2)


def _end(number: int, frame: Any) -> NoReturn:
    """Turns a signal into an exit that runs what ends the processes."""
    sys.exit(128 + number)


def _run(args: argparse.Namespace, console: Any, errors: Any) -> int:
    import data
    import messages
    import processes
    import screen

    started = time.perf_counter()
    images = data.load(args.data)
    samples = min(args.samples or len(images.train[1]), len(images.train[1]))
    epochs, batch = args.epochs or images.epochs, args.batch or images.batch
    steps = _steps(samples, batch, messages.WORLD)
    plans = _plans(args.plan)
    output = _folder(args.output)
    for which, plan in enumerate(plans):
        plan.save(output / f"plan-rank{which}.json")
    jobs = [
        messages.Job(which, args.data, args.samples and samples, epochs, batch, args.inner, args.seed, output, Path())
        for which in range(messages.WORLD)
    ]
    _announce(console, images, samples, args)
    results: list[Any] = [None] * messages.WORLD
    try:
        with screen.Bar(console, epochs, steps, len(images.test[1])) as bar, processes.Ranks(jobs) as ranks:
            for which, message in ranks.messages():
                if isinstance(message, messages.Result):
                    results[which] = message
                else:
                    bar.show(which, message)
    except processes.RankFailed as failed:
        plan = args.plan if failed.rank == 1 and args.plan else jobs[failed.rank].plan
        errors.print(
            screen.failure(failed.rank, failed.what, failed.expected, plan, jobs[failed.rank].log), soft_wrap=True
        )
        return 1
    console.print(screen.summary(results, jobs, plans, len(images.test[1]), time.perf_counter() - started))
    console.print(f"Plans, explanations and logs are in {output}{os.sep}", soft_wrap=True, markup=False)
    right = results[0].digest == results[1].digest and not any(result.unexplained for result in results)
    return 0 if right else 1


def _steps(samples: int, batch: int, world: int) -> int:
    from data import DataError

    steps = samples // (batch * world)
    if batch < 2 or not steps:
        raise DataError(
            f"{samples} images make {steps} steps of {batch} images on each of {world} ranks",
            where="--samples, --batch",
            do="a batch norm needs a batch of two, and an epoch a step: give more images or another batch",
        )
    return steps


def _folder(given: Path | None) -> Path:
    from qsync_fx import QSyncError

    named = given or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        named.mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise QSyncError(
            f"the output folder cannot be made: {error.strerror}", where=str(named), do="give another one by --output"
        ) from error
    return named


def _plans(given: Path | None) -> list[Any]:
    """Returns the plan of each rank; they read them from the output folder."""
    from qsync_fx import Plan

    low = Plan.uniform("int8")
    for pattern, precision in RECOVERED:
        low = low.with_precision(pattern, precision)
    return [Plan.uniform("fp32"), Plan.load(given) if given else low]


def _announce(console: Any, images: Any, samples: int, args: argparse.Namespace) -> None:
    from rich.markup import escape

    size = "x".join(str(side) for side in images.train[0].shape[2:])
    count = f"all {samples}" if samples == len(images.train[1]) else f"{samples} of {len(images.train[1])}"
    console.print(f"[bold]qsync_fx demo[/]: a ResNet on {escape(images.name)}, on two unequal ranks")
    console.print(f"  {count} training images of {size} pixels, {len(images.test[1])} test images\n")
    if args.data is None and images.name.startswith("scikit"):
        console.print(
            "[dim]Fashion-MNIST is not installed (Debian: apt-get install dataset-fashion-mnist; or --data PATH)."
        )


if __name__ == "__main__":
    sys.exit(main())
