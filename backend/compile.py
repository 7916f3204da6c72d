"""From Dynamo's graph to compiled code.

Invariant: what comes back takes what Dynamo's graph takes and returns what it returns, type for type. The inner compiler gets a plain
fx.GraphModule of ATen and `qsync::` operators, as if Dynamo had written it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_fx.backend import operators, overflow
from qsync_fx.backend.dynamo.parallel import compile_anew_where_split
from qsync_fx.backend.dynamo.record import record
from qsync_fx.backend.dynamo.shared_code import tell_of_shared_code
from qsync_fx.backend.dynamo.skipped import told
from qsync_fx.backend.inductor import decompositions, dropout, keep_less, layout, tuned
from qsync_fx.backend.operators.attention import attend_by_products
from qsync_fx.backend.operators.attention_masks import lay_out_masks
from qsync_fx.backend.operators.multiplying import conv_on_cpu
from qsync_fx.backend.operators.multiplying.collect import prepare
from qsync_fx.backend.second_order import telling
from qsync_fx.backend.unasked import candidates, note_unasked, tell_of_a_stale_profile, with_cached_plan
from qsync_fx.backend.weights_once import Lifted, lift
from qsync_fx.backend.widened_norms import widened
from qsync_fx.cached.candidates import Candidates
from qsync_fx.coverage.log import log_of
from qsync_fx.coverage.settle import settle_when_called_again, wait_for_a_step
from qsync_fx.devices import check_target, support, targeted
from qsync_fx.errors import PlanError
from qsync_fx.graph import Context, PrecisionGraph
from qsync_fx.graph.copies import copied_module
from qsync_fx.options import Options
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.pipeline import pipeline, run_or_fall_back
from qsync_fx.passes.running.instruments import Instrument
from qsync_fx.passes.tracing.frames import (
    Place,
    compile_for_this_module_only,
    in_backward_pass,
    place,
    warn_at_the_limit,
)
from qsync_fx.passes.verify import verify_strides
from qsync_fx.plan.opid import OpId
from qsync_fx.plan_in_force import plan_in_force
from qsync_fx.precision import FP32

Compiled = Callable[..., Any]


def rewrite(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    instruments: Sequence[Instrument] = (),
    seen: Iterable[OpId] = (),
    unasked: Candidates | None = None,
) -> PrecisionGraph:
    """Runs the pipeline on a graph of Dynamo's; must be called while Dynamo compiles.

    Args:
        module, inputs, options: as a backend gets them.
        instruments: watch the passes.
        seen: the operators of the model's other graphs.
        unasked: plans of cached profiles, of which one may be the model's.

    Raises:
        QSyncError: the options, the plan or a pass do not fit the model, or the device is not supported.
    """
    device = _device(module, inputs)
    with targeted(options.target, device), _unhooked():
        context = context_for(module, inputs, options, seen)
        fakes = _fake(inputs, context.fake_mode)
        stale: list[str] = []
        passes = with_cached_plan(pipeline(options, operators.lowerings(), context.training), unasked, stale.append)
        if not instruments and not options.passes:
            # Nobody reads what operators cost when a model is compiled, and counting it takes longer than a pass.
            passes = tuple(step for step in passes if not isinstance(step, AnnotateCost))

        def make() -> PrecisionGraph:
            # Dynamo reads its graph afterwards, so a user's pass that comes first works on a copy.
            copy = not isinstance(passes[0], Normalize)
            return PrecisionGraph(copied_module(module) if copy else module, fakes, context)

        graph = run_or_fall_back(make, passes, instruments)
        attend_by_products(graph)
        lay_out_masks(graph)
        verify_strides(graph, "attention")
    for why in stale[:1]:
        tell_of_a_stale_profile(why, place(options), options)
    return graph


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Runs the pipeline and hands the result to the inner compiler."""
    if in_backward_pass():
        return _compile_backward(module, inputs, options)
    plan, here = options.plan, place(options)
    unasked = candidates(here, options, _device(module, inputs))
    alone = False
    if options.passes or (plan is not None and (plan.patterns or plan.operators)):
        alone = compile_for_this_module_only(here)
    elif unasked is not None:
        try:
            alone = compile_for_this_module_only(here)
        except PlanError as error:
            tell_of_a_stale_profile(error.what, here, options)
            unasked = None
    if options.target is not None:
        check_target(options.target, _device(module, inputs))
    graph = rewrite(module, inputs, options, seen=_seen(here, options), unasked=unasked)
    note_unasked(graph, here, options)
    record(graph, here, options, module, alone)
    compile_anew_where_split(inputs)
    overflow.watch(graph, here.root)
    if not options.automatic and graph.operators("adjustable"):
        warn_at_the_limit(here)
    if not alone:
        tell_of_shared_code(graph, here, graph.context.options)
    wait_for_a_step()
    device = graph.context.device
    fast_dropout = dropout.serves(graph)
    kernels = prepare(graph) + " fast_dropout" * fast_dropout + " keep_less" * options.keep_less
    # Casts are explicit now, in the backward pass too: it is not to be traced under the region that the model is called in.
    with (
        torch._functorch.config.patch(backward_pass_autocast="off"),
        tuned.tracing(device, kernels),
        keep_less.settings() if options.keep_less else nullcontext(),
        told(graph),
        conv_on_cpu.laid_out_later() if options.inner == "inductor" else nullcontext(),
    ):
        extras = tuned.captures(options, device), options.keep_less
        lifted = lift(graph) if options.weights_once else Lifted(device)
        compiler = inner_compiler(options.inner, device, fast_dropout, *extras)
        compiled = lifted.around(compiler(graph.module, [*inputs, *lifted.inputs]))
    run = telling(compiled, graph, options.inner)
    if (
        here.root is not None
        and here.entered
        and here.resumes_at is None
        and not here.nested
        and _evaluates(graph, here.root)
    ):
        return settle_when_called_again(run, here.root, options)
    return run


def _evaluates(graph: PrecisionGraph, root: torch.nn.Module) -> bool:
    return not (graph.context.training and root.training)


def _compile_backward(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Compiles a backward pass that compiled autograd has recorded, as it is: its formats were settled with the forward pass."""
    device = _device(module, pytree.tree_leaves(list(inputs)))
    with torch.autocast(device.type, enabled=False):
        compiled = inner_compiler(options.inner, device, cudagraphs=tuned.captures(options, device))(module, inputs)

    def without_autocast(*args: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return compiled(*args)

    return without_autocast


def inner_compiler(
    name: str, device: torch.device, fast_dropout: bool = False, cudagraphs: bool = False, keep_less: bool = False
) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Returns what compiles the rewritten graph for `device`: "inductor", "aot_eager" or "eager"."""
    prepared = widened if device.type == "cuda" else _as_it_is
    if name == "eager":
        return lambda module, inputs: prepared(module).forward
    from torch._dynamo.backends.registry import lookup_backend

    found: Any = lookup_backend(name)
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx_inner

        tuned.register_with_inductor()
        patches = tuned.inductor(device, cudagraphs, keep_less)
        settings = {
            "inner_compile": tuned.remembering(compile_fx_inner),
            "decompositions": decompositions.for_inductor(device, fast_dropout, keep_less),
        }
        return lambda module, inputs: found(
            module, list(inputs), **settings, config_patches=patches | layout.settings(device, module)
        )
    return lambda module, inputs: found(prepared(module), list(inputs))


def _as_it_is(module: fx.GraphModule) -> fx.GraphModule:
    return module


def context_for(module: fx.GraphModule, inputs: Sequence[Any], options: Options, seen: Iterable[OpId] = ()) -> Context:
    """Returns what the compilation under way knows beside the graph."""
    here = place(options)
    tracing = TracingContext.try_get()
    device = _device(module, inputs)
    support(device, FP32)  # raises for a device that qsync_fx does not run on
    return Context(
        device=device,
        options=options,
        plan=plan_in_force(options, device),
        fake_mode=tracing.fake_mode if tracing is not None else None,
        ambient=(True, torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else None,
        training=torch.is_grad_enabled(),
        complete=_is_complete(module, here),
        seen=frozenset(seen),
        lowerings=operators.lowerings(),
        # Below a path that the user gives the rest of the model is not known.
        modules=frozenset(path for path, _ in here.modules.values())
        if here.root is not None and not here.within
        else None,
    )


def _seen(here: Place, options: Options) -> Iterator[OpId]:
    """Yields the operators that earlier graphs of the model held."""
    for frame in log_of(options).frames.values():
        if here.root is not None and frame.root() is here.root:
            yield from frame.operators


def _device(module: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    devices += [t.device for t in (*module.parameters(), *module.buffers())]
    accelerated = [device for device in devices if device.type != "cpu"]
    return (accelerated or devices or [torch.device("cpu")])[0]


def _fake(inputs: Sequence[Any], mode: FakeTensorMode | None) -> list[Any]:
    """Returns fake tensors with the symbolic sizes that Dynamo has given the inputs."""
    tracing = TracingContext.try_get()
    if mode is None or tracing is None:
        return list(inputs)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        contexts: Any = tracing.tensor_to_context
        symbolic = contexts.get(value)
        return mode.from_tensor(
            value,
            symbolic_context=symbolic,
            source=symbolic.tensor_source if symbolic is not None else None,
            static_shapes=symbolic is None,
        )

    return [fake(value) for value in inputs]


def _unhooked() -> AbstractContextManager[object]:
    """Keeps what the passes trace from hooks of the code that is compiled: checkpointing around it counts the tensors that are saved."""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()  # as under functorch, which lets none be
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _is_complete(module: fx.GraphModule, here: Place) -> bool:
    """Whether the graph is the whole of what is compiled: DDP has not split it, and no graph break ends, precedes or surrounds it."""
    reason = getattr(module, "compile_subgraph_reason", None)
    whole = here.entered and here.resumes_at is None and not here.nested
    return whole and reason is not None and not reason.graph_break
