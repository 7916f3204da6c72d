"""Notes down what a graph holds when it is compiled: its operators, as the passes decided, and the modules that they belong to.

Invariant: a module is held by a graph where one of its parameters is an input, or an operator has its path: modules whose parameters
another one uses (tied weights, the projection of an attention layer) are held as much as those that are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx, nn

from qsync_fx.coverage.log import Ran, below, log_of, note_graph
from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.module_tree import own_parameters, paths, unwrapped
from qsync_fx.options import Options
from qsync_fx.passes.tracing.frames import Place, translator


def record(graph: PrecisionGraph, here: Place, options: Options, module: fx.GraphModule, alone: bool) -> None:
    """Notes down `graph`, made of Dynamo's `module`, in the log of `options`; `alone` where the code is for one module only."""
    if here.code is None:
        return
    operators = [_ran(operator) for operator in graph.operators()]
    tensors = _tensors(module)
    for path, root in _roots(here):
        held = {name for name, part in paths(root) if any(id(p) in tensors for p in own_parameters(part))}
        inside = [ran for ran in operators if below(ran.id.module, path) is not None]
        held |= {rest for ran in inside if (rest := below(ran.id.module, path))}
        if here.root is not None or held:
            frame = log_of(options).frame(here.code, root)
            frame.alone = frame.alone or alone
            note_graph(frame, here.root or root, path, inside, held)


def _roots(here: Place) -> Iterator[tuple[str, nn.Module]]:
    if here.module is not None:
        yield here.path, here.module
    else:
        yield from ((path, unwrapped(module)) for path, module in here.given)


def _ran(operator: Operator) -> Ran:
    note, source = operator.note, operator.source
    line = f"{Path(source.file).name}:{source.line}" if source else ""
    return Ran(note.id, note.kind, note.planned, note.precision, note.output, operator.reason, line)


def _tensors(module: fx.GraphModule) -> set[int]:
    """The addresses of the tensors that the compilation under way reads: parameters are inputs of Dynamo's graphs, or held by them."""
    tx = translator()
    inputs = [argument.example for argument in tx.output.graphargs if argument.is_tensor] if tx is not None else []
    return {id(t) for t in (*inputs, *module.parameters()) if isinstance(t, torch.Tensor)}
