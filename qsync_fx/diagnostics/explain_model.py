"""`explain`: a run of a model as written that records the backend's decisions.

The model runs so that Dynamo reaches the code after graph breaks.

Invariant: buffers and random number generators are restored; parameters are not trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizeContext

from qsync_fx.coverage.compilation_log import collecting
from qsync_fx.coverage.findings import findings, uncovered
from qsync_fx.coverage.module_coverage import Tree, models
from qsync_fx.diagnostics.explanation import Explained, Explanation, Registered
from qsync_fx.diagnostics.model_state import forward_restored
from qsync_fx.errors import PlanError, QSyncError
from qsync_fx.module_paths import joined
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.passes.printer import Snapshots, Timing
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.validation import check_plan


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | Options | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain `torch.compile(model, backend="qsync", options=options)` with these inputs.

    Args:
        model: a module or function.
        args, kwargs: inputs of the model.
        options: options of the backend.

    Raises:
        QSyncError: any error of the backend, or a pattern of the plan that matches no operator.
    """
    parsed = Options.parse(options)
    collected: list[Explained] = []
    model = getattr(model, "_orig_mod", model)
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(module, nn.Module):
        module = nn.Module()  # a function without state

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        collected.append(explained(graph, inputs, parsed, collected))
        return graph.forward

    with forward_restored(module), _own_cache() as breaks, collecting(parsed) as log:
        observed(model, backend, parsed)(*args, **kwargs)
        trees = [Tree(root, log) for root in models(log)]
    missing = [module for tree in trees for module in uncovered(tree)]
    plan = next((tree.plan for tree in trees), parsed.plan or Plan())
    adjustable = [
        op.id for part in collected for op in part.operators if op.kind is Kind.ADJUSTABLE
    ]
    result = findings(plan, adjustable, missing)
    parameters = tuple(_registered(trees))
    explanation = Explanation(
        tuple(collected), tuple(breaks()), result.uncovered, parameters, parsed.plan
    )
    if parsed.plan is not None and not collected:
        raise PlanError(
            "Dynamo compiled no part of the model, so no plan applies to it",
            where="; ".join(map(_short, explanation.breaks)) or "the whole model",
            do="remove the graph break; one in a loop or a with statement leaves the whole function to Python",
        )
    if parsed.plan is not None:
        check_plan(plan, adjustable, complete=True, as_written=result.as_written)
    return explanation


def _registered(trees: Sequence[Tree]) -> Iterator[Registered]:
    visited: set[int] = set()
    for tree in trees:
        for path, module in tree.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in visited:
                    continue
                visited.add(id(parameter))
                full = joined(tree.within, path, name)
                yield Registered(
                    full, parameter.numel(), parameter.element_size(), parameter.requires_grad
                )


def explained(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, before: Sequence[Explained]
) -> Explained:
    """Return the explanation of a graph from Dynamo; `before` are the model's earlier graphs."""
    from qsync_fx.backend.compile import rewrite
    from qsync_fx.backend.dynamo_hooks import record
    from qsync_fx.backend.entry import through_dynamo
    from qsync_fx.passes.cached_plan import candidates
    from qsync_fx.passes.tracing.dynamo_frames import compile_for_this_module_only, place

    snapshots, timing = Snapshots(), Timing()
    try:
        current = place(options)
        alone = compile_for_this_module_only(
            current
        )  # code shared by layers would have the ids of one layer
        visited = [operator.id for part in before for operator in part.graph.operators()]
        device = next(
            (x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu")
        )
        graph = rewrite(
            module,
            inputs,
            options,
            (timing, snapshots),
            visited,
            candidates(current, options, device),
        )
        record(graph, current, options, module, alone)
    except QSyncError as error:
        raise through_dynamo(error) from error.__cause__
    return Explained(graph, snapshots, timing)


def observed(
    model: Callable[..., Any],
    backend: Callable[..., Any],
    options: Options,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return the model as compiled by torch.compile, recording Dynamo's results."""
    from qsync_fx.backend.dynamo_hooks import observe

    context = torch._dynamo.optimize(backend, dynamic=dynamic)
    if isinstance(context, OptimizeContext):  # unless Dynamo is disabled
        observe(context, model, options)
    compiled: Callable[..., Any] = context(model)
    return compiled


def _short(text: str) -> str:
    """Return the reason for a graph break and the skipped frame, from Dynamo's text."""
    first, *others = (line.strip() for line in text.splitlines())
    skipped = (line.partition(": ")[2] for line in others if "frame skipped" in line)
    return ", ".join([first, *skipped])


@contextlib.contextmanager
def _own_cache() -> Iterator[Callable[[], list[str]]]:
    """Lift Dynamo's recompile limits; yield a function that returns the graph breaks so far."""
    from torch._dynamo.utils import counters

    # A break that leaves a whole frame to Python counts as "unimplemented", not as a graph break.
    kinds = ("graph_break", "unimplemented")
    before = {kind: dict(counters[kind]) for kind in kinds}

    def breaks() -> list[str]:
        texts = [
            t
            for kind in kinds
            for t, count in counters[kind].items()
            if count > before[kind].get(t, 0)
        ]
        return [
            text
            for text in texts
            if not any(other != text and other.startswith(text) for other in texts)
        ]

    with torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
        yield breaks
