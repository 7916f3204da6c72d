"""`explain`: a run of a model as written that records the backend's decisions.

The model runs so that Dynamo reaches the code after graph breaks.

Invariant: buffers and random number generators are restored; parameters are not trained.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from qsync_fx import torch_internals as internals
from qsync_fx.coverage.compilation_log import Tree, collecting, models
from qsync_fx.coverage.findings import uncovered
from qsync_fx.diagnostics.explanation import Explained, Explanation, Registered
from qsync_fx.diagnostics.model_state import forward_restored
from qsync_fx.errors import PlanError, QSyncError
from qsync_fx.module_paths import joined
from qsync_fx.options import Options
from qsync_fx.passes.printer import Snapshots, Timing
from qsync_fx.plan.plan import Plan


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | Options | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain `torch.compile(model, backend="qsync", options=options)` with these inputs.

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
    if parsed.plan is not None and not collected:
        raise PlanError(
            "Dynamo compiled no part of the model, so no plan applies to it",
            where="; ".join(map(_short, breaks())) or "the whole model",
            do="remove the graph break; in a loop or a with statement, it prevents compilation of "
            "the whole function",
        )
    missing = tuple(module for tree in trees for module in uncovered(tree))
    explanation = Explanation(tuple(collected), tuple(breaks()), missing, _registered(trees))
    plan = next((tree.plan for tree in trees), parsed.plan or Plan())
    return explanation.compared(plan, check=parsed.plan is not None)


def _registered(trees: Sequence[Tree]) -> tuple[Registered, ...]:
    result: dict[int, Registered] = {}
    for tree in trees:
        for path, module in tree.modules.items():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in result:
                    sizes = p.numel(), p.element_size()
                    full = joined(tree.within, path, name)
                    result[id(p)] = Registered(full, *sizes, p.requires_grad)
    return tuple(result.values())


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
        # Code shared by layers would have the ids of one layer.
        alone = compile_for_this_module_only(current)
        visited = [operator.id for part in before for operator in part.operators]
        device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
        cached = candidates(current, options, device)
        graph = rewrite(module, inputs, options, (timing, snapshots), visited, cached)
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

    context = internals.dynamo_optimize(backend, dynamic=dynamic)
    if isinstance(context, internals.OptimizeContext):  # unless Dynamo is disabled
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

    def counts() -> Counter[str]:
        # A break that leaves a whole frame to Python counts as "unimplemented".
        return Counter(internals.counters["graph_break"]) + Counter(
            internals.counters["unimplemented"]
        )

    before = counts()

    def breaks() -> list[str]:
        texts = list(counts() - before)
        return [t for t in texts if not any(o != t and o.startswith(t) for o in texts)]

    with internals.dynamo_config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16):
        yield breaks
