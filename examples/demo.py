"""Train a small ResNet on two unequal ranks, in low precision and under a plan.

Rank 0 emulates a training device and computes in FP32. Rank 1 emulates an
inference device: it may compute in BF16, is slower, and has less memory. Both
run on this CPU with one thread each. Rank 1 is slower because it has a third
more images in each step. Each rank measures a profile. Rank 0 then solves for
the plan: rank 1 computes in BF16 only as many operators as it needs to keep
pace, and how many images each rank has in a step. The model is trained twice,
with steps interleaved: with rank 1 uniformly in BF16, and with the plan. The
final tables compare predictions with measurements, and show what formats and
batches contribute. With --no-plan-batches, only the formats are planned.

Invariant: the exit code is 0 if and only if the training completed, the compiled precisions equal
the explained ones, and the weights of both ranks are bit-equal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

SLOWER = 4 / 3
"""Ratio of rank 1's images per step to rank 0's."""
_ROUNDS = 15
"""Most interleaved runs of each measured plan: the machine's speed varies between runs."""


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
    """Run the demo and print errors of its arguments."""
    from rich.console import Console

    from qsync_fx import QSyncError

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console, errors = (
        Console(highlight=False),
        Console(stderr=True, highlight=False, soft_wrap=True),
    )
    try:
        return _run(args, console, errors)
    except QSyncError as error:
        errors.print("[bold red]demo:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2


def _arguments() -> argparse.Namespace:
    description = (__doc__ or "").partition("Invariant")[0].rstrip()
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--epochs", type=_positive, metavar="N", help="default: 3, digits 10, 2 with --quick"
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="images per step on rank 0; default: 96, digits 24; rank 1 has a third more",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help='folder with the four files of MNIST\'s format, plain or .gz, or "digits"; default: '
        "Fashion-MNIST if Debian's dataset-fashion-mnist is installed, else scikit-learn's digits",
    )
    parser.add_argument(
        "--samples",
        type=_positive,
        metavar="N",
        help="number of training images, drawn at random; default: 20000",
    )
    parser.add_argument(
        "--memory",
        type=_positive,
        metavar="MB",
        help="limit of rank 1's peak memory; default: the mean of its peaks in FP32 and BF16",
    )
    parser.add_argument(
        "--plan-batches",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also plan the images of each rank, from measurements of two batch sizes",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="PATH",
        help="train with this plan, for rank 1, or for both as in the plan.json of a run; skips "
        "the "
        "measurement and the prediction",
    )
    parser.add_argument(
        "--inner-backend",
        choices=("inductor", "aot_eager", "eager"),
        default="inductor",
        help="backend that compiles the rewritten graphs; only inductor is measured, so the others "
        "require --plan",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="digits, a smaller network, few rounds: a short run without valid measurements",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="the same seed gives the same weights; default: 0",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="folder for plans, profiles, timelines and explanations; default: runs/demo-DATE-TIME",
    )
    return parser.parse_args()


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
            f"demo: {error.name} is not installed for {sys.executable}\n  do:    run `make "
            "setup`, then `make demo` or "
            "`.venv/bin/python examples/demo.py`",
            file=sys.stderr,
        )
        sys.exit(2)


def _end(number: int, frame: Any) -> NoReturn:
    """Convert a signal to SystemExit, so that context managers end the rank processes."""
    sys.exit(128 + number)


def _run(args: argparse.Namespace, console: Any, errors: Any) -> int:
    import data
    import messages
    import outcome
    import processes
    import screen

    from qsync_fx.serialization.atomic_files import write_text

    started = time.perf_counter()
    if args.quick:
        args.data = args.data or "digits"
    images = data.load(args.data)
    jobs = _jobs(args, images, console.width)
    steps = (jobs[0].samples or len(images.train[1])) // sum(jobs[0].batches)
    _announce(console, images, jobs[0], args)
    results: list[Any] = [None] * messages.WORLD
    planned = None
    try:
        with (
            screen.Bar(console, jobs[0], steps, len(images.test[1])) as bar,
            processes.Ranks(jobs) as ranks,
        ):
            for rank, message in ranks.messages():
                if isinstance(message, messages.Result):
                    results[rank] = message
                    continue
                if isinstance(message, messages.PlanMessage):
                    planned = message
                bar.show(rank, message)
    except processes.RankFailed as failed:
        job = jobs[failed.rank]
        errors.print(
            screen.failure(
                failed.rank, failed.what, failed.expected, args.plan or job.plan, job.log
            ),
            soft_wrap=True,
        )
        return 1
    result = outcome.Outcome(jobs[0], planned, results, len(images.test[1]))
    console.print(outcome.summary(result, time.perf_counter() - started))
    output = jobs[0].output
    write_text(output / "outcome.json", json.dumps(result.to_json(), indent=1) + "\n")
    report = output / "report.html"
    if report.exists():
        console.print(f"Open {report} in a browser to see the plan.", soft_wrap=True, markup=False)
    console.print(
        f"Plan, profiles, timelines for ui.perfetto.dev and explanations are in {output}{os.sep}",
        soft_wrap=True,
        markup=False,
    )
    return int(not result.right)


def _jobs(args: argparse.Namespace, images: Any, width: int) -> list[Any]:
    """Return the job of each rank.

    Raises:
        DataError: the data or the arguments allow no training step.
        PlanError: the given plan cannot be read.
    """
    import messages
    from data import DataError

    from qsync_fx.plan.cluster_plan import read_plan

    if args.plan is not None:
        read_plan(args.plan)
    elif args.inner_backend != "inductor":
        raise DataError(
            "only code that inductor compiles can be measured",
            where=f"--inner-backend {args.inner_backend}",
            do="add --plan, or remove --inner-backend",
        )
    batch = args.batch or images.batch
    batches = (batch, round(batch * SLOWER))
    samples = min(args.samples or images.samples, len(images.train[1]))
    if batch < 2 or samples < sum(batches):
        raise DataError(
            f"{samples} images are not enough for a step of {batches[0]} and {batches[1]} images",
            where="--samples, --batch",
            do="use more images or another batch: an epoch needs one step, and a batch two images",
        )
    epochs, rounds = args.epochs or images.epochs, _ROUNDS
    if args.quick:
        epochs, rounds = args.epochs or 2, 2
    output = _folder(args.output)
    return [
        messages.Job(
            rank,
            args.data,
            samples if samples < len(images.train[1]) else None,
            epochs,
            batches,
            args.quick,
            rounds,
            args.memory and args.memory * 1e6,
            args.plan_batches,
            args.plan,
            args.inner_backend,
            args.seed,
            output,
            Path(),
            width,
        )
        for rank in range(messages.WORLD)
    ]


def _folder(path: Path | None) -> Path:
    from qsync_fx import QSyncError

    named = path or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        named.mkdir(parents=True, exist_ok=path is not None)
    except OSError as error:
        raise QSyncError(
            f"the output folder cannot be made: {error.strerror}",
            where=str(named),
            do="give another one by --output",
        ) from error
    return named


def _announce(console: Any, images: Any, job: Any, args: argparse.Namespace) -> None:
    import torch
    from rich.markup import escape

    from qsync_fx.devices import support
    from qsync_fx.formats import FORMATS

    size = "x".join(str(side) for side in images.train[0].shape[2:])
    count = "all"
    if job.samples is not None:
        count = f"{job.samples} of"
    native = support(torch.device("cpu"), FORMATS["bf16"])
    console.print(
        f"[bold]qsync_fx demo[/]: a ResNet on {escape(images.name)}, on a training and an "
        "inference device"
    )
    console.print(
        f"  {count} {len(images.train[1])} training images of {size} pixels, "
        f"{len(images.test[1])} test images"
    )
    console.print(f"  rank 0, training:   FP32, {job.batches[0]} images a step")
    console.print(
        f"  rank 1, inference:  BF16 or FP32, {job.batches[1]} images a step, which make it the "
        "slower rank; memory is limited"
    )
    if job.joint and args.plan is None:
        console.print(
            "  The plan chooses the images of both ranks, with the same sum, and the formats of "
            "rank 1."
        )
    console.print(
        "  Both are processes on this CPU with one thread each. "
        f"BF16 is {native.kind} here: {escape(native.reason)}.\n"
    )
    if args.data is None and images.name.startswith("scikit") and not args.quick:
        console.print(
            "[dim]Fashion-MNIST is not installed (Debian: apt-get install dataset-fashion-mnist; "
            "or --data PATH)."
        )


if __name__ == "__main__":
    sys.exit(main())
