"""`qsync measure`: durations of operators in each format on this machine, and memory of steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import model_args, output, training_args
from qsync_fx.cli.command import Command
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile

_ABOUT = f"""\
Trains a model for some steps under a few plans, and attributes the time of the
compiled code to its operators. What comes out foresees any other plan. As to the
loss, {training_args.LOSS}.

The model is compiled once a plan, which takes seconds to minutes each. With
--output a measurement that was interrupted goes on from there.

With --device nothing is measured: the profile is what the catalog says of a
device that is not at hand, such as those of a cluster. The step runs here, to see
what it gives the model."""

_EXAMPLES = """\
examples:
  qsync measure bert:small --output cpu.json
  qsync measure bert:small --precisions fp32,bf16 --optimizer sgd
  qsync measure bert:small --plan plan.json --output cpu.json   measures the plan itself, too
  qsync measure bert:small --plan plan.json --profile cpu.json  the plan alone, which corrects cpu.json
  qsync measure bert:small --device t4 --output t4.json         a T4, by the catalog"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    measured = training_args.add(
        parser,
        "what to measure, and how",
        "formats with commas between them; by default what the device computes itself",
        "a profile",
    )
    training_args.add_optimizer(measured)
    measured.add_argument(
        "--device",
        metavar="NAME",
        help="of the catalog, or the path of a file of one: its profile is reckoned, and nothing measured; see docs/howto-device.md",
    )
    measured.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="one that is there: only what --plan names is measured, and corrects it; --output may name another file to write",
    )
    measured.add_argument(
        "--sensitivity",
        metavar="METHOD",
        help="how it is found what operators add to the variance of gradients (see qsync sensitivity), or none; exact by default",
    )
    measured.add_argument(
        "--repeats", metavar="N", type=int, help="how often each plan has its turn; 7 by default"
    )
    measured.add_argument(
        "--cache",
        action="store_true",
        help="keep it where torch.compile finds it: without a plan or a precision the model trains by the plan found from it from then on",
    )
    training_args.add_output(
        parser,
        "the profile, for other commands",
        "the profile to standard output, as its file holds it",
    )


def _measure(arguments: argparse.Namespace) -> None:
    from qsync_fx.profiler.measurement import REPEATS, measure

    if arguments.device is not None:
        _from_catalog(arguments)
        return
    trained = training_args.read(arguments)
    inputs = trained.given
    if arguments.profile is not None and arguments.sensitivity is not None:
        message = "a profile that is corrected keeps its sensitivity"
        raise OptionError(
            message,
            where="--sensitivity",
            do="leave it out, or leave --profile out to measure anew",
        )
    path = arguments.output or arguments.profile
    options = {name: value for name, value in model_args.given(arguments).items() if name != "plan"}
    profile = measure(
        trained.module,
        trained.step,
        trained.batches,
        trained.precisions,
        optimizer=training_args.optimizer(arguments.optimizer, trained.module),
        plan=() if inputs.options.plan is None else inputs.options.plan,
        profile=arguments.profile,
        repeats=REPEATS if arguments.repeats is None else arguments.repeats,
        sensitivity=None
        if arguments.sensitivity == "none"
        else arguments.sensitivity or "second_order",
        path=path,
        options=options,
    )
    if path is not None:
        output.wrote(path)
    if arguments.cache:
        from qsync_fx.allocator.api import cache_plan

        output.wrote(cache_plan(profile))
    _tell(profile, arguments)


def _from_catalog(arguments: argparse.Namespace) -> None:
    """Compute a profile from the catalog; refuse arguments that apply to measurements only."""
    from qsync_fx.devices import get
    from qsync_fx.profiler.analytic_profile import catalog_profile

    measuring = {
        model_args.flag(name): value
        for name, value in model_args.given(arguments).items()
        if name != "precision"
    }
    measuring |= {
        f"--{name}": getattr(arguments, name) or None
        for name in ("profile", "sensitivity", "repeats", "cache")
    }
    if text := [name for name, value in measuring.items() if value is not None]:
        are = "is" if len(text) == 1 else "are"
        message = f"a profile of the catalog is computed, and {', '.join(text)} {are} for profiles measured here"
        raise OptionError(message, where="--device", do="leave one or the other out")
    device = get(arguments.device)
    trained = training_args.read(arguments)
    optimizer = training_args.optimizer(arguments.optimizer, trained.module)
    profile = catalog_profile(
        device, trained.module, trained.step, trained.batches[0], trained.precisions, optimizer
    )
    if arguments.output is not None:
        output.wrote(profile.save(arguments.output))
    _tell(profile, arguments)


def _tell(profile: Profile, arguments: argparse.Namespace) -> None:
    from qsync_fx.profiler.profile import PROFILE, profile_table

    if arguments.json:
        output.as_json(PROFILE.plain(profile))
    else:
        output.show(profile_table(profile))


COMMAND = Command(
    "how long operators take here, in each format", _measure, _arguments, _ABOUT, _EXAMPLES
)
