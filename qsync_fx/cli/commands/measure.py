"""`qsync measure`: durations of operators in each format on this machine, and memory of steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile

_ABOUT = f"""\
Trains a model for some steps under a few plans, and attributes the time of the
compiled code to its operators. The resulting profile predicts any other plan.
{model_args.LOSS}

The model is compiled once per plan, which takes seconds to minutes each. With
--output, an interrupted measurement resumes.

With --device, the profile of a device that is not in this machine is computed from
the catalog instead. The step still runs here, to record the inputs of the model and
the memory of the loss."""

_EXAMPLES = """\
examples:
  qsync measure bert:small --output cpu.json
  qsync measure bert:small --precisions fp32,bf16 --optimizer sgd
  qsync measure bert:small --plan plan.json --output cpu.json   also measures the plan
  qsync measure bert:small --plan plan.json --profile cpu.json  corrects cpu.json by the plan
  qsync measure bert:small --device t4 --output t4.json         a T4 from the catalog
  qsync measure bert:small --batch-sizes 8,32 --output cpu.json for plans with other batches"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    measured = model_args.add_training(
        parser,
        "measurement",
        "comma-separated formats; by default the native formats of the device",
        "a profile",
        refused={"skip_unprofitable": model_args.EVERY_FORMAT},
    )
    model_args.add_optimizer(measured)
    add_options(
        measured,
        """
        --device NAME         device of the catalog, or path of a device file: compute its profile
                              without a measurement; see qsync docs howto-device
        --profile FILE        existing profile to correct: measures only the plan of --plan;
                              --output writes the result to another file
        --sensitivity METHOD  method for the gradient variance that operators add (see qsync
                              sensitivity), or none; second_order by default
        --repeats N           interleaved runs of each plan; 7 by default
        --batch-sizes N,N     comma-separated batch sizes to measure, two or three, for qsync plan
                              --batch; by default the size of the model's inputs
        --cache               cache the plan found from this profile: torch.compile then uses it for
                              this model if neither a plan nor a precision is given
        """,
        {"profile": Path, "repeats": int, "batch_sizes": _sizes},
    )
    json = "print the profile in the format of its file"
    model_args.add_output(parser, "write the profile for other commands", json)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _measure(arguments: argparse.Namespace) -> None:
    from qsync_fx.profiler.measurement import REPEATS, measure

    if arguments.device is not None:
        _from_catalog(arguments)
        return
    trained = model_args.read_training(arguments)
    inputs = trained.arguments
    if arguments.profile is not None and arguments.sensitivity is not None:
        message = "the correction of a profile does not change its sensitivity"
        do = "remove --sensitivity, or remove --profile to measure a new profile"
        raise OptionError(message, where="--sensitivity", do=do)
    method = arguments.sensitivity or "second_order"
    path = arguments.output or arguments.profile
    profile = measure(
        trained.module,
        trained.step,
        trained.batches,
        trained.precisions,
        optimizer=model_args.optimizer(arguments.optimizer, trained.module),
        plan=() if inputs.options.plan is None else inputs.options.plan,
        profile=arguments.profile,
        batch_sizes=arguments.batch_sizes or (),
        repeats=REPEATS if arguments.repeats is None else arguments.repeats,
        sensitivity=None if method == "none" else method,
        path=path,
        options=model_args.measured(arguments),
    )
    if path is not None:
        output.wrote(path)
    if arguments.cache:
        from qsync_fx.allocator.api import cache_plan

        output.wrote(cache_plan(profile))
    _show(profile, arguments)


def _from_catalog(arguments: argparse.Namespace) -> None:
    """Compute a profile from the catalog; refuse arguments that apply to measurements only."""
    from qsync_fx.devices import get
    from qsync_fx.profiler.analytic_profile import catalog_profile
    from qsync_fx.profiler.batch_interpolation import merge_batch_sizes
    from qsync_fx.profiler.sensitivity.gradient_step import sized

    measuring = {
        model_args.flag(name): value
        for name, value in model_args.explicit_options(arguments).items()
        if name != "precision"
    }
    measuring |= {
        f"--{name}": getattr(arguments, name) or None
        for name in ("profile", "sensitivity", "repeats", "cache")
    }
    if unsupported := [name for name, value in measuring.items() if value is not None]:
        raise OptionError(
            f"--device runs no measurement, so it cannot be combined with {', '.join(unsupported)}",
            where="--device",
            do=f"remove --device, or remove {', '.join(unsupported)}",
        )
    device = get(arguments.device)
    trained = model_args.read_training(arguments)
    optimizer = model_args.optimizer(arguments.optimizer, trained.module)
    profiles = [
        catalog_profile(device, trained.module, trained.step, batch, trained.precisions, optimizer)
        for batch in sized(trained.batches[0], arguments.batch_sizes or ())
    ]
    profile = merge_batch_sizes(profiles)
    if arguments.output is not None:
        output.wrote(profile.save(arguments.output))
    _show(profile, arguments)


def _show(profile: Profile, arguments: argparse.Namespace) -> None:
    from qsync_fx.profiler.profile import PROFILE, profile_table

    if arguments.json:
        output.as_json(PROFILE.plain(profile))
    else:
        output.show(profile_table(profile))


COMMAND = Command(
    "measure operators in each format on this machine", _measure, _arguments, _ABOUT, _EXAMPLES
)
