"""From Dynamo's graph to compiled code.

Invariant: what comes back takes what Dynamo's graph takes and returns what it returns, type for type. The inner compiler gets a plain
fx.GraphModule of ATen and `qsync::` operators, as if Dynamo had written it.

Plans that nobody asked for: what a cached profile has for a model, found, put into the pipeline and told.

Invariant: a plan is in force only for models for which neither a plan nor a precision was asked, which includes autocast around the model.
What is taken is told once for each model, and why nothing is, once for each reason.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from qsync_fx.backend import numeric_guards, operators
from qsync_fx.backend.dynamo_hooks import (
    compile_anew_where_split,
    record,
    tell_of_shared_code,
    told,
)
from qsync_fx.backend.inductor import (
    decompositions,
    decompositions as dropout,
    inductor_config,
    layouts,
    recompute_policy,
)
from qsync_fx.backend.numeric_guards import telling, widened
from qsync_fx.backend.operators.attention import attend_by_products, lay_out_masks
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.gemm.precompile_problems import prepare
from qsync_fx.backend.weight_cache import Lifted, lift
from qsync_fx.coverage.compilation_log import log_of
from qsync_fx.coverage.first_step_check import settle_when_called_again, wait_for_a_step
from qsync_fx.devices.format_support import support
from qsync_fx.devices.target_override import check_target, targeted
from qsync_fx.errors import PlanError, PlanWarning
from qsync_fx.formats import FP32
from qsync_fx.graph.graph import Context, PrecisionGraph, copied_module
from qsync_fx.options import Options, active_plan
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.cached_plan import CachedPlan
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.pass_base import Pass
from qsync_fx.passes.pass_manager import pipeline, run_or_fall_back
from qsync_fx.passes.printer import Instrument
from qsync_fx.passes.tracing.dynamo_frames import (
    SourcePlace,
    compile_for_this_module_only,
    in_backward_pass,
    place,
    warn_at_the_limit,
)
from qsync_fx.passes.verifier import verify_strides
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import CACHED
from qsync_fx.plan_cache import SWITCH, Candidates, candidates_for

_LOG = logging.getLogger("qsync_fx")


def candidates(current: SourcePlace, options: Options, device: torch.device) -> Candidates | None:
    """Returns the plans that a graph may get without having asked; None where there are none."""
    if current.root is None:
        return None
    result = candidates_for(current.root, options, log_of(options).unasked.get(current.root))
    # A device that qsync_fx does not run on, which torch may not know autocast for, is told by others.
    return None if result is None or torch.is_autocast_enabled(device.type) else result


def with_cached_plan(
    passes: Sequence[Pass], result: Candidates | None, tell: Callable[[str], None]
) -> tuple[Pass, ...]:
    """Returns the passes with the one that takes a plan, where there are any; `tell` is told why none is taken."""
    if result is None:
        return tuple(passes)
    index = next(index for index, step in enumerate(passes) if isinstance(step, Assign))
    return (*passes[:index], CachedPlan(result, tell), *passes[index:])


def note_unasked(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Notes down the plan that a graph has got without having asked, and says so of the model's first one."""
    plan = graph.context.options.plan
    if not options.is_default or plan is None or current.root is None:
        return
    log = log_of(options)
    if log.unasked.get(current.root) != plan:
        log.unasked[current.root] = plan
        _LOG.warning("%s: %s", type(current.root).__name__, plan.notes[CACHED])


def tell_of_a_stale_profile(why: str, current: SourcePlace, options: Options) -> None:
    """Says once that a profile is there and is not taken."""
    log, name = log_of(options), type(current.root).__name__
    if current.root is None or not current.root.training or name in log.stale:
        return
    log.stale.add(name)
    text = (
        f"a profile of {name} is in the cache, but {why}. So it trains as if there were none; measure it again "
        f"(qsync_fx.cache_plan(qsync_fx.measure(...))), or switch cached plans off: the option cached_plan=False, or {SWITCH}=0."
    )
    warnings.warn(text, PlanWarning, stacklevel=2)


Compiled = Callable[..., Any]


def rewrite(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    instruments: Sequence[Instrument] = (),
    observed: Iterable[OpId] = (),
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
        context = context_for(module, inputs, options, observed)
        fakes = _fake(inputs, context.fake_mode)
        stale: list[str] = []
        passes = with_cached_plan(
            pipeline(options, operators.lowerings(), context.training), unasked, stale.append
        )
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
    plan, current = options.plan, place(options)
    unasked = candidates(current, options, _device(module, inputs))
    alone = False
    if options.passes or (plan is not None and (plan.patterns or plan.operators)):
        alone = compile_for_this_module_only(current)
    elif unasked is not None:
        try:
            alone = compile_for_this_module_only(current)
        except PlanError as error:
            tell_of_a_stale_profile(error.what, current, options)
            unasked = None
    if options.target is not None:
        check_target(options.target, _device(module, inputs))
    graph = rewrite(module, inputs, options, observed=_seen(current, options), unasked=unasked)
    note_unasked(graph, current, options)
    record(graph, current, options, module, alone)
    compile_anew_where_split(inputs)
    numeric_guards.watch(graph, current.root)
    if not options.is_default and graph.operators("adjustable"):
        warn_at_the_limit(current)
    if not alone:
        tell_of_shared_code(graph, current, graph.context.options)
    wait_for_a_step()
    device = graph.context.device
    fast_dropout = dropout.serves(graph)
    kernels = (
        prepare(graph)
        + " fast_dropout" * fast_dropout
        + " activation_recompute" * options.activation_recompute
    )
    # Casts are explicit now, in the backward pass too: it is not to be traced under the region that the model is called in.
    with (
        torch._functorch.config.patch(backward_pass_autocast="off"),
        inductor_config.tracing(device, kernels),
        recompute_policy.settings() if options.activation_recompute else nullcontext(),
        told(graph),
        cpu_kernels.laid_out_later() if options.inner_backend == "inductor" else nullcontext(),
    ):
        extras = inductor_config.captures(options, device), options.activation_recompute
        lifted = lift(graph) if options.cache_quantized_weights else Lifted(device)
        compiler = inner_compiler(options.inner_backend, device, fast_dropout, *extras)
        compiled = lifted.around(compiler(graph.module, [*inputs, *lifted.inputs]))
    run = telling(compiled, graph, options.inner_backend)
    if (
        current.root is not None
        and current.entered
        and current.resumes_at is None
        and not current.nested
        and _evaluates(graph, current.root)
    ):
        return settle_when_called_again(run, current.root, options)
    return run


def _evaluates(graph: PrecisionGraph, root: torch.nn.Module) -> bool:
    return not (graph.context.training and root.training)


def _compile_backward(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Compiles a backward pass that compiled autograd has recorded, as it is: its formats were settled with the forward pass."""
    device = _device(module, pytree.tree_leaves(list(inputs)))
    with torch.autocast(device.type, enabled=False):
        compiled = inner_compiler(
            options.inner_backend, device, cudagraphs=inductor_config.captures(options, device)
        )(module, inputs)

    def without_autocast(*args: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return compiled(*args)

    return without_autocast


def inner_compiler(
    name: str,
    device: torch.device,
    fast_dropout: bool = False,
    cudagraphs: bool = False,
    activation_recompute: bool = False,
) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Returns what compiles the rewritten graph for `device`: "inductor", "aot_eager" or "eager"."""
    prepared = widened if device.type == "cuda" else _as_it_is
    if name == "eager":
        return lambda module, inputs: prepared(module).forward
    from torch._dynamo.backends.registry import lookup_backend

    result: Any = lookup_backend(name)
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx_inner

        inductor_config.register_with_inductor()
        patches = inductor_config.inductor(device, cudagraphs, activation_recompute)
        settings = {
            "inner_compile": inductor_config.remembering(compile_fx_inner),
            "decompositions": decompositions.for_inductor(
                device, fast_dropout, activation_recompute
            ),
        }
        return lambda module, inputs: result(
            module,
            list(inputs),
            **settings,
            config_patches=patches | layouts.settings(device, module),
        )
    return lambda module, inputs: result(prepared(module), list(inputs))


def _as_it_is(module: fx.GraphModule) -> fx.GraphModule:
    return module


def context_for(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, observed: Iterable[OpId] = ()
) -> Context:
    """Returns what the compilation under way knows beside the graph."""
    current = place(options)
    tracing = TracingContext.try_get()
    device = _device(module, inputs)
    support(device, FP32)  # raises for a device that qsync_fx does not run on
    return Context(
        device=device,
        options=options,
        plan=active_plan(options, device),
        fake_mode=tracing.fake_mode if tracing is not None else None,
        ambient=(True, torch.get_autocast_dtype(device.type))
        if torch.is_autocast_enabled(device.type)
        else None,
        training=torch.is_grad_enabled(),
        complete=_is_complete(module, current),
        seen=frozenset(observed),
        lowerings=operators.lowerings(),
        # Below a path that the user gives the rest of the model is not known.
        modules=frozenset(path for path, _ in current.modules.values())
        if current.root is not None and not current.within
        else None,
    )


def _seen(current: SourcePlace, options: Options) -> Iterator[OpId]:
    """Yields the operators that earlier graphs of the model held."""
    for frame in log_of(options).frames.values():
        if current.root is not None and frame.root() is current.root:
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


def _is_complete(module: fx.GraphModule, current: SourcePlace) -> bool:
    """Whether the graph is the whole of what is compiled: DDP has not split it, and no graph break ends, precedes or surrounds it."""
    reason = getattr(module, "compile_subgraph_reason", None)
    full = current.entered and current.resumes_at is None and not current.nested
    return full and reason is not None and not reason.graph_break
