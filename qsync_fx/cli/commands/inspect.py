"""`qsync inspect`: effects of the backend on a model, without training it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args, output
from qsync_fx.cli.command import Command, add_options
from qsync_fx.errors import QSyncError
from qsync_fx.formatting import number

if TYPE_CHECKING:
    from qsync_fx.diagnostics import Explanation
    from qsync_fx.graph import Operator

_ABOUT = """\
Prints every operator of a model: its kind, its precision and the reason for it,
the format of its output, its source line, and its cost. Lines do not wrap in a
pipe; COLUMNS=100 sets their width."""

_EXAMPLES = """\
examples:
  qsync inspect bert:small --precision int8               the table
  qsync inspect bert:small --kind adjustable              operators that a plan decides
  qsync inspect bert:small --after cascade                the graph after a pass
  qsync inspect bert:small --diff assign insert_casts     changes between two passes
  qsync inspect bert:small --plan-out plan.json           a plan to edit and use with --plan
  qsync inspect bert:small --json | jq .operators[].id    output for programs"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    model_args.add(parser, inspection=True)
    printed = parser.add_argument_group("output")
    printed.add_argument(
        "--kind",
        choices=("adjustable", "dependent", "fixed"),
        help="show only operators of this kind, in the table and in JSON",
    )
    show = printed.add_mutually_exclusive_group()
    add_options(show, "--after PASS  print the graph after this pass instead of the table")
    show.add_argument(
        "--diff",
        metavar=("A", "B"),
        nargs=2,
        help="print the changes of the graph between pass A and pass B",
    )
    add_options(show, "--json  print one JSON object with more details than the table")
    write = parser.add_argument_group("output files")
    add_options(
        write,
        """
        --dot FILE             write the operators and their data flow for Graphviz
        --model-explorer FILE  write them as JSON for Model Explorer, with modules as layers
        --plan-out FILE        write a plan with the precision of every adjustable operator, to edit
        """,
        dict.fromkeys(("dot", "model_explorer", "plan_out"), output.to_write),
    )


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.kind and (arguments.after or arguments.diff):
        raise QSyncError(
            "--kind does not apply to the graph that --after and --diff print",
            where="--kind",
            do="remove --kind, or remove --after and --diff",
        )
    explanation = model_args.read(arguments).explain()
    if arguments.after:
        print(explanation.graph(arguments.after))
    elif arguments.diff:
        output.diff(explanation.diff(*arguments.diff))
    elif arguments.json:
        output.as_json(_as_json(explanation, arguments.kind))
    else:
        _show(explanation, arguments.kind)
    files = {
        arguments.dot: explanation.save_dot,
        arguments.model_explorer: explanation.save_model_explorer,
        arguments.plan_out: explanation.plan().save,
    }
    for path, save in files.items():
        if path:
            save(path)
            output.wrote(path)


def _show(explanation: Explanation, kind: str | None) -> None:
    from qsync_fx.diagnostics.explanation import explanation_table
    from qsync_fx.ops import Kind

    output.show(explanation_table(explanation, Kind(kind) if kind else None, output.width()))


def _as_json(explanation: Explanation, kind: str | None) -> Mapping[str, object]:
    shown = [operator for operator in explanation.operators if kind in (None, operator.kind)]
    return {
        "operators": [operator_as_json(operator) for operator in shown],
        "passes": [
            {"name": name, "seconds": seconds} for name, seconds in explanation.seconds.items()
        ],
        "graphs": len(explanation.graphs),
        "breaks": list(explanation.breaks),
        "unknown": explanation.unknown,
        "device": str(explanation.graphs[0].graph.context.device),
    }


def operator_as_json(operator: Operator) -> Mapping[str, object]:
    """Return a JSON-compatible description of an operator, with more details than the table."""
    note, source = operator.note, operator.source
    formats = {
        name: getattr(getattr(note, name), "name", None)
        for name in ("planned", "precision", "output")
    }
    sizes = {
        name: _number(getattr(note.cost, name, None)) for name in ("flops", "bytes", "saved_bytes")
    }
    place = None
    if source is not None:
        place = {"file": source.file, "line": source.line, "code": source.code}
    return {
        "id": str(note.id),
        "kind": str(note.kind),
        **formats,
        "reason": operator.reason,
        **sizes,
        "source": place,
    }


def _number(size: Any) -> object:
    """Return a size as a number, or as the text of its formula if shapes are symbolic."""
    available = number(size)
    return str(size) if available is None and size is not None else available


COMMAND = Command("show the operators of a model", _inspect, _arguments, _ABOUT, _EXAMPLES)
