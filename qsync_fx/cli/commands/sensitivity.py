"""`qsync sensitivity`: gradient variance that each operator adds in each precision."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsync_fx.cli import output, training_args
from qsync_fx.cli.command import Command
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

_ABOUT = f"""\
Runs a model for some steps, in FP32, and says what each operator would add to
the variance of its gradients in each precision: what a plan for mixed precision
keeps small. Nothing is trained.
{training_args.LOSS.capitalize()}.

The inputs are one batch, of which --fraction is used, in each step anew.
--check runs other methods and real quantized passes beside it and says how well
they agree (Spearman's correlation of ranks); it costs a pass an operator,
precision and draw. What was interrupted goes on from its last step when it is
asked again with the same --output: steps are kept in OUTPUT.partial."""

_EXAMPLES = """\
examples:
  qsync sensitivity bert:small
  qsync sensitivity bert:small --precisions bf16,int8 --output sensitivity.json
  qsync sensitivity bert:small --method paper
  qsync sensitivity bert:small --check --steps 8"""

_COMPARED = ("second_order", "injected", "depth", "paper", "fisher")
_TRUTH = "monte_carlo"


def _arguments(parser: argparse.ArgumentParser) -> None:
    alone = OptionError(
        "a sensitivity is that of each operator alone", where="--plan", do="leave the plan out"
    )
    settings = training_args.add(
        parser,
        "what to find, and how",
        "with commas between them; by default narrow ones that the device has units for",
        "a sensitivity",
        refused={"plan": alone},
    )
    settings.add_argument(
        "--method",
        metavar="NAME",
        default="second_order",
        help="how: second_order (default), injected, paper and others",
    )
    settings.add_argument(
        "--steps", metavar="N", type=int, default=50, help="a mean over so many steps (%(default)s)"
    )
    settings.add_argument(
        "--fraction",
        metavar="F",
        type=float,
        default=0.5,
        help="how much of the batch (%(default)s)",
    )
    settings.add_argument(
        "--check", action="store_true", help="compare methods with real quantized passes"
    )
    training_args.add_output(
        parser,
        "the sensitivity, for programs",
        "the same to standard output, in place of the table",
    )


def _sensitivity(arguments: argparse.Namespace) -> None:
    from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY
    from qsync_fx.profiler.sensitivity.estimate import several
    from qsync_fx.profiler.sensitivity.indicator_registry import method

    method(arguments.method)
    trained = training_args.read(arguments)
    partial = None if arguments.output is None else pathlib.Path(f"{arguments.output}.partial")
    methods = (
        list(dict.fromkeys([arguments.method, *_COMPARED, _TRUTH]))
        if arguments.check
        else [arguments.method]
    )
    result = several(
        trained.module,
        trained.step,
        trained.batches,
        methods,
        trained.precisions,
        arguments.steps,
        arguments.fraction,
        options=trained.given.options,
        partial=partial,
    )
    if partial is not None:
        result[0].save(arguments.output)
        partial.unlink(missing_ok=True)
        output.wrote(arguments.output)
    if arguments.json:
        output.as_json(SENSITIVITY.plain(result[0].finite()))
        return
    _show(result[0])
    if arguments.check:
        _show_agreement(result)


def _show(result: Sensitivity) -> None:
    from qsync_fx.predictor.indicator.sensitivity_map import rows, summary

    heading, *body = rows(result)
    output.show(output.table(heading, body, heading[1:]))
    print(f"\n{summary(result)}")


def _show_agreement(result: Sequence[Sensitivity]) -> None:
    from qsync_fx.predictor.indicator.sensitivity_map import agreement

    *methods, truth = result
    heading = (
        "method",
        "precision",
        "operators",
        "Spearman",
        "times the truth",
        "spread of the truth",
        "seconds",
    )
    body = []
    for name in truth.precisions:
        for item in methods:
            a = agreement(item, truth, name)
            numbers = (
                f"{a.operators}",
                f"{a.spearman:.2f}",
                f"{a.ratio:.2g}",
                f"{a.spread:.2g}",
                f"{item.seconds:.1f}",
            )
            body.append((item.method, name, *numbers))
    print(
        f"\nheld to real quantized passes, mean square error of the gradients, {truth.seconds:.0f} s"
    )
    output.show(output.table(heading, body, heading[2:]))


COMMAND = Command(
    "what narrow operators add to the variance of gradients",
    _sensitivity,
    _arguments,
    _ABOUT,
    _EXAMPLES,
)
