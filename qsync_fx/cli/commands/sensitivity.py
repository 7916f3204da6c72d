"""`qsync sensitivity`: gradient variance that each operator adds in each precision."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

_ABOUT = f"""\
Runs a model in FP32 for some steps, and estimates the variance that each operator
would add to the gradients in each precision. A mixed-precision plan minimizes this
variance. No model is trained.
{model_args.LOSS}

Each step draws the share --fraction of the batch. --check also runs other methods
and real quantized passes, and reports their agreement (Spearman's rank
correlation); it costs one pass per operator, precision and draw. With --output, an
interrupted command resumes from its last step: steps are saved in OUTPUT.partial."""

_EXAMPLES = """\
examples:
  qsync sensitivity bert:small
  qsync sensitivity bert:small --precisions bf16,int8 --output sensitivity.json
  qsync sensitivity bert:small --method paper
  qsync sensitivity bert:small --check --steps 8"""

_COMPARED = ("second_order", "injected", "paper")
_TRUTH = "monte_carlo"


def _arguments(parser: argparse.ArgumentParser) -> None:
    alone = OptionError(
        "a sensitivity does not depend on a plan: it covers each operator separately",
        where="--plan",
        do="remove --plan",
    )
    settings = model_args.add_training(
        parser,
        "estimation",
        "comma-separated formats; by default the native formats of the device narrower than fp32",
        "a sensitivity",
        refused={"plan": alone},
    )
    add_options(
        settings,
        """
        --method NAME  method: second_order (default), injected, paper and others
        --steps N      number of steps to average over (%(default)s)
        --fraction F   share of the batch for each step (%(default)s)
        --check        compare methods with real quantized passes
        """,
        {"steps": int, "fraction": float},
        method="second_order",
        steps=50,
        fraction=0.5,
    )
    json = "print the sensitivity as JSON instead of the table"
    model_args.add_output(parser, "write the sensitivity as JSON", json)


def _sensitivity(arguments: argparse.Namespace) -> None:
    from qsync_fx.predictor.indicator.sensitivity_map import SENSITIVITY, sensitivity_table
    from qsync_fx.profiler.sensitivity.estimate import several
    from qsync_fx.profiler.sensitivity.gradient_step import method

    method(arguments.method)
    trained = model_args.read_training(arguments)
    partial, methods = None, [arguments.method]
    if arguments.output is not None:
        partial = pathlib.Path(f"{arguments.output}.partial")
    if arguments.check:
        methods = list(dict.fromkeys([arguments.method, *_COMPARED, _TRUTH]))
    result = several(
        trained.module,
        trained.step,
        trained.batches,
        methods,
        trained.precisions,
        arguments.steps,
        arguments.fraction,
        options=trained.arguments.options,
        partial=partial,
    )
    if partial is not None:
        result[0].save(arguments.output)
        partial.unlink(missing_ok=True)
        output.wrote(arguments.output)
    if arguments.json:
        output.as_json(SENSITIVITY.plain(result[0].finite()))
        return
    output.show(sensitivity_table(result[0]))
    if arguments.check:
        _show_agreement(result)


def _show_agreement(result: Sequence[Sensitivity]) -> None:
    from qsync_fx.predictor.indicator.sensitivity_map import agreement

    *methods, truth = result
    numeric = ("operators", "Spearman", "ratio to reference", "reference spread", "seconds")
    body = []
    for name in truth.precisions:
        for item in methods:
            a = agreement(item, truth, name)
            numbers = f"{a.operators}", f"{a.spearman:.2f}", f"{a.ratio:.2g}", f"{a.spread:.2g}"
            body.append((item.method, name, *numbers, f"{item.seconds:.1f}"))
    reference = "mean square error of the gradients in real quantized passes"
    print(f"\nreference: {reference}, {truth.seconds:.0f} s")
    output.show(output.table(("method", "precision", *numeric), body, numeric))


COMMAND = Command(
    "estimate the gradient variance of each operator", _sensitivity, _arguments, _ABOUT, _EXAMPLES
)
