"""The command `qsync`: what the backend does to a model, and what this machine offers, in a terminal.

Invariant: what goes wrong in the words of qsync_fx (`QSyncError`) is told in its three lines, with status 2, as argparse does for
arguments. What the user's own code raises comes with its traceback: that is what it takes to find it. Results go to standard output
and everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qsync_fx import __version__, kernels_cli, tune_cli
from qsync_fx.errors import QSyncError
from qsync_fx.options import DOCUMENTED

if TYPE_CHECKING:
    from qsync_fx.explanation import Explanation
    from qsync_fx.graph import Operator

_ABOUT = """\
Trains a model with each operator in a planned precision: torch.compile(model, backend="qsync").

This command shows what that does to a model before anything is trained."""

_INSPECT = """\
Prints every operator of a model: who decides its precision, which one it gets
and why, the format of its output, the line of the model it comes from, and
what it costs. Piped, a line is as long as it gets; COLUMNS=100 makes it fit.

MODULE:CALLABLE names a function without arguments that returns (model, args)
or (model, args, kwargs), as you would call model(*args, **kwargs). MODULE is
found as by "python -m": in the current folder, or installed. As in bert.py:

    def small():
        config = transformers.BertConfig(num_hidden_layers=2)
        inputs = {"input_ids": torch.randint(0, 1000, (8, 128))}
        return transformers.BertModel(config), (), inputs

The model runs once on these inputs, so that graph breaks are found. Nothing is
trained, and the model is left as it was."""

_EXAMPLES = """\
examples:
  qsync inspect bert:small --precision int8               the table
  qsync inspect bert:small --kind adjustable              what a plan decides
  qsync inspect bert:small --after cascade                the graph after a pass
  qsync inspect bert:small --diff assign insert_casts     what passes changed
  qsync inspect bert:small --plan-out plan.json           a plan to edit, for --plan
  qsync inspect bert:small --json | jq .operators[].id    for programs"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0; 2 for anything that qsync_fx or argparse complains of."""
    for stream in (sys.stdout, sys.stderr):
        # Module names and source lines may hold what a terminal's encoding cannot say.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except QSyncError as error:
        print(f"qsync: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="qsync", description=_ABOUT, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of qsync_fx, torch and Python")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect", help="what the backend does to a model", description=_INSPECT, epilog=_EXAMPLES, formatter_class=raw
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("model", metavar="MODULE:CALLABLE", help="what returns (model, args) or (model, args, kwargs)")

    options = inspect.add_argument_group("options of the backend")
    options.add_argument("--precision", metavar="NAME", help=DOCUMENTED["precision"])
    options.add_argument("--plan", metavar="FILE", help="path of a saved plan, in place of --precision")
    options.add_argument("--rounding", metavar="HOW", help=DOCUMENTED["rounding"])
    options.add_argument("--gradient-rounding", metavar="HOW", help=DOCUMENTED["gradient_rounding"])
    options.add_argument("--scaling", metavar="WHAT", help=DOCUMENTED["scaling"])
    options.add_argument("--target", metavar="GPU", help=DOCUMENTED["target"])
    options.add_argument("--exact", action="store_true", default=None, help=DOCUMENTED["exact"].removeprefix("True: "))
    options.add_argument(
        "--pass",
        dest="passes",
        metavar="NAME",
        action="append",
        help="also run this pass of an installed package; repeatable",
    )
    mode = options.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="mode", action="store_const", const="train", help="call model.train() before")
    mode.add_argument(
        "--eval",
        dest="mode",
        action="store_const",
        const="eval",
        help="call model.eval() before, and record no gradients",
    )

    printed = inspect.add_argument_group("what to print")
    printed.add_argument(
        "--kind", choices=("adjustable", "dependent", "fixed"), help="in table and JSON only operators of this kind"
    )
    show = printed.add_mutually_exclusive_group()
    show.add_argument("--after", metavar="PASS", help="the graph after this pass, in place of the table")
    show.add_argument(
        "--diff", metavar=("A", "B"), nargs=2, help="what changed in the graph from after pass A to after pass B"
    )
    show.add_argument("--json", action="store_true", help="everything in the table and more, as one JSON object")

    write = inspect.add_argument_group("files to write")
    write.add_argument("--dot", metavar="FILE", help="the operators and what flows between them, for Graphviz")
    write.add_argument(
        "--plan-out",
        metavar="FILE",
        help="a plan that names every adjustable operator in the precision it got: a start for edits",
    )

    doctor = commands.add_parser(
        "doctor",
        help="what this machine offers",
        description="Says what this machine offers (torch, CPU, CUDA, compilers, CUTLASS) and how each precision runs on it.",
    )
    doctor.set_defaults(run=_doctor)
    kernels_cli.add(commands)
    tune_cli.add(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        print(f"qsync_fx {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        parser.exit()


def _inspect(arguments: argparse.Namespace) -> None:
    import torch

    from qsync_fx.explanation import explain
    from qsync_fx.model_reference import load

    if arguments.kind and (arguments.after or arguments.diff):
        raise QSyncError("a graph is shown whole", where="--kind", do="leave --kind out, or --after and --diff")
    named = ("precision", "plan", "rounding", "gradient_rounding", "scaling", "exact", "target", "passes")
    options = {name: getattr(arguments, name) for name in named if getattr(arguments, name) is not None}
    model, args, kwargs = load(arguments.model)
    if arguments.mode and isinstance(model, torch.nn.Module):
        model.train(arguments.mode == "train")
    with torch.set_grad_enabled(arguments.mode != "eval" and torch.is_grad_enabled()):
        explanation = explain(model, *args, options=options, **kwargs)
    if not explanation.graphs:
        raise QSyncError(
            "the model made no graph", where=arguments.model, do="return a model that computes something with tensors"
        )
    if arguments.after:
        print(explanation.graph(arguments.after))
    elif arguments.diff:
        _print_diff(explanation.diff(*arguments.diff))
    elif arguments.json:
        print(json.dumps(_as_json(explanation, arguments.kind), indent=2))
    else:
        _print_table(explanation, arguments.kind)
    for path, save in ((arguments.dot, explanation.save_dot), (arguments.plan_out, explanation.plan().save)):
        if path:
            save(path)
            print(f"qsync: wrote {path}", file=sys.stderr)


def _print_table(explanation: Explanation, kind: str | None) -> None:
    from qsync_fx.ops import Kind
    from qsync_fx.report.console import columns, console
    from qsync_fx.report.text import explanation_table

    if sys.stdout.isatty():
        terminal = console()
        terminal.print(explanation_table(explanation, Kind(kind) if kind else None, terminal.width))
    else:
        print(explanation.table(kind, columns()))


def _print_diff(diff: str) -> None:
    from rich.console import Console
    from rich.text import Text

    styles = {"+": "green", "-": "red", "@": "cyan"}
    if not sys.stdout.isatty():
        print(diff)
        return
    console = Console()
    for line in diff.splitlines():
        console.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)


def _as_json(explanation: Explanation, kind: str | None) -> Mapping[str, object]:
    shown = [operator for operator in explanation.operators if kind in (None, operator.kind)]
    return {
        "operators": [_operator_as_json(operator) for operator in shown],
        "passes": [{"name": name, "seconds": seconds} for name, seconds in explanation.seconds.items()],
        "graphs": len(explanation.graphs),
        "breaks": list(explanation.breaks),
        "unknown": explanation.unknown,
        "device": str(explanation.graphs[0].graph.context.device),
    }


def _operator_as_json(operator: Operator) -> Mapping[str, object]:
    note, source = operator.note, operator.source
    names = {
        name: None if value is None else value.name
        for name, value in (("planned", note.planned), ("precision", note.precision), ("output", note.output))
    }
    sizes = {name: _number(getattr(note.cost, name, None)) for name in ("flops", "bytes", "saved_bytes")}
    place = None if source is None else {"file": source.file, "line": source.line, "code": source.code}
    return {"id": str(note.id), "kind": str(note.kind), **names, "reason": operator.reason, **sizes, "source": place}


def _number(size: Any) -> object:
    """Returns a size as a number, or as the text of its formula where it depends on symbolic shapes."""
    return size if size is None or isinstance(size, int | float) else str(size)


def _doctor(arguments: argparse.Namespace) -> None:
    from qsync_fx.doctor import doctor, render
    from qsync_fx.report.console import console

    console().print(render(doctor()))


if __name__ == "__main__":
    sys.exit(main())
