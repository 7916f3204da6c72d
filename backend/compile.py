"""Compilation of a Dynamo graph: pass pipeline, inner compiler, and plans from cached profiles.

The inner compiler receives a plain fx.GraphModule of ATen and `qsync::` operators. Invariant:
compiled code has the signature and the result types of Dynamo's graph.

A plan from a cached profile is active only if the user set neither a plan nor a precision for the
model, including autocast around it. Its use is reported once per model, and its absence once per
reason.
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
    """Return the cached plans that a graph may use by default; None if there are none."""
    if current.root is None:
        return None
    result = candidates_for(current.root, options, log_of(options).unasked.get(current.root))
    # Unsupported devices, for which torch may lack autocast, are reported elsewhere.
    return None if result is None or torch.is_autocast_enabled(device.type) else result


def with_cached_plan(
    passes: Sequence[Pass], result: Candidates | None, tell: Callable[[str], None]
) -> tuple[Pass, ...]:
    """Return the passes, with `CachedPlan` before `Assign` if there are candidates.

    Args:
        tell: receives the reason if no plan is used.
    """
    if result is None:
        return tuple(passes)
    index = next(index for index, step in enumerate(passes) if isinstance(step, Assign))
    return (*passes[:index], CachedPlan(result, tell), *passes[index:])


def note_unasked(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Record the default plan of a graph, and log the first one of a model."""
    plan = graph.context.options.plan
    if not options.is_default or plan is None or current.root is None:
        return
    log = log_of(options)
    if log.unasked.get(current.root) != plan:
        log.unasked[current.root] = plan
        _LOG.warning("%s: %s", type(current.root).__name__, plan.notes[CACHED])


def tell_of_a_stale_profile(why: str, current: SourcePlace, options: Options) -> None:
    """Warn once that a profile exists but is not used."""
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
    """Run the pipeline on a Dynamo graph, while Dynamo compiles.

    Args:
        module, inputs, options: as a backend receives them.
        instruments: observers of the passes.
        observed: operators of the model's other graphs.
        unasked: plans of cached profiles that may apply to the model.

    Raises:
        QSyncError: the options, the plan or a pass do not fit the model, or the device is
            unsupported.
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
            # Compilation does not use operator costs, and computing them takes longer than a pass.
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
    """Run the pipeline and compile the result with the inner compiler."""
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
    # Casts are explicit by now, in the backward pass too, so it must not be traced under the
    # caller's autocast region.
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
    """Compile a backward pass of compiled autograd without passes.

    The forward pass already determined its formats.
    """
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
    """Return the compiler of the rewritten graph: "inductor", "aot_eager" or "eager"."""
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
    """Return the context of the current compilation."""
    current = place(options)
    tracing = TracingContext.try_get()
    device = _device(module, inputs)
    support(device, FP32)  # raises for an unsupported device
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
        # With a user-defined root path, the rest of the model is unknown.
        modules=frozenset(path for path, _ in current.modules.values())
        if current.root is not None and not current.within
        else None,
    )


def _seen(current: SourcePlace, options: Options) -> Iterator[OpId]:
    """Yield the operators of earlier graphs of the model."""
    for frame in log_of(options).frames.values():
        if current.root is not None and frame.root() is current.root:
            yield from frame.operators


def _device(module: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    devices += [t.device for t in (*module.parameters(), *module.buffers())]
    accelerated = [device for device in devices if device.type != "cpu"]
    return (accelerated or devices or [torch.device("cpu")])[0]


def _fake(inputs: Sequence[Any], mode: FakeTensorMode | None) -> list[Any]:
    """Return fake tensors with the symbolic sizes that Dynamo assigned to the inputs."""
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
    """Return a context that shields tracing from saved-tensor hooks of the compiled code.

    Checkpointing around it, for example, counts the saved tensors.
    """
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()  # functorch, for example, forbids such hooks
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _is_complete(module: fx.GraphModule, current: SourcePlace) -> bool:
    """Return whether the graph is complete: no split by DDP, and no graph break around it."""
    reason = getattr(module, "compile_subgraph_reason", None)
    full = current.entered and current.resumes_at is None and not current.nested
    return full and reason is not None and not reason.graph_break
