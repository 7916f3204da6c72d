"""Compilation of a Dynamo graph: pass pipeline and inner compiler.

The inner compiler receives a plain fx.GraphModule of ATen and `qsync::` operators. Invariant:
compiled code has the signature and the result types of Dynamo's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
    inductor_config,
    layouts,
    recompute_policy,
)
from qsync_fx.backend.numeric_guards import telling, widened
from qsync_fx.backend.operators.attention import attend_by_products, lay_out_masks
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.layer_kernels import prepare
from qsync_fx.backend.weight_cache import Lifted, lift
from qsync_fx.coverage.compilation_log import log_of
from qsync_fx.coverage.first_step_check import settle_when_called_again, wait_for_a_step
from qsync_fx.devices.format_support import check_target, support, targeted
from qsync_fx.errors import PlanError
from qsync_fx.formats import FP32
from qsync_fx.graph.graph import Context, PrecisionGraph, copied_module
from qsync_fx.options import Options, active_plan
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.cached_plan import (
    Candidates,
    candidates,
    note_default_plan,
    warn_of_stale_profile,
    with_cached_plan,
)
from qsync_fx.passes.normalize import Normalize
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
        warn_of_stale_profile(why, place(options), options)
    return graph


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Run the pipeline and compile the result with the inner compiler."""
    if in_backward_pass():
        return _compile_backward(module, inputs, options)
    return CompilationSession(module, inputs, options).run()


@dataclass
class CompilationSession:
    """Compilation of one Dynamo graph, by the steps of `run`, while Dynamo compiles a frame.

    Most steps have effects outside the graph, so their order is a contract:

    1. `restrict_reuse` comes first: if the code of one module cannot follow its plan, it must raise
       before anything is recorded. It drops cached plans that `run_passes` must not use, and sets
       `module_only`, which `record_operators` and `report_reuse` read.
    2. `check_device` raises, so it also precedes all records.
    3. `run_passes` makes the lowered graph, which all later steps read. It reads the operators of
       the model's earlier graphs from the log, so it precedes `record_operators`.
    4. `record_operators` writes the graph to the log of the options. The check of the first
       training step, which `watch_training` registers, and later graphs of the model read the log.
    5. `watch_training` and `report_reuse` install guards and hooks, and warn. `report_reuse` raises
       with the option "strict", before any time is spent on kernels.
    6. `prepare_kernels` compiles the kernels. Tracing in `compile_module` selects among those that
       did compile, under a cache key that identifies them. The quantizers of weights are among
       them, so this step precedes the lift of weight quantization in `compile_module`.
    7. `compile_module` runs the inner compiler. `check_runs` wraps its result.

    Attributes:
        module, inputs, options: as a backend receives them.
        current: position of the graph in the user's model.
        device: device of the graph.
        module_only: whether the code is guarded against reuse for other modules.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    current: SourcePlace = field(init=False)
    device: torch.device = field(init=False)
    module_only: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.current = place(self.options)
        self.device = _device(self.module, self.inputs)

    def run(self) -> Compiled:
        """Return the compiled code; the class describes the order of the steps."""
        cached_plans = self.restrict_reuse()
        self.check_device()
        graph = self.run_passes(cached_plans)
        self.record_operators(graph)
        self.watch_training(graph)
        self.report_reuse(graph)
        fast_dropout = decompositions.serves(graph)
        cache_key = self.prepare_kernels(graph, fast_dropout)
        compiled = self.compile_module(graph, fast_dropout, cache_key)
        return self.check_runs(compiled, graph)

    def restrict_reuse(self) -> Candidates | None:
        """Guard the code against reuse for other modules, if their plans may differ.

        Returns:
            the cached plans that the graph may use; None if there are none.

        Raises:
            PlanError: each module needs code of its own, more than Dynamo's recompile limit.
        """
        plan, cached_plans = self.options.plan, candidates(self.current, self.options, self.device)
        if self.options.passes or (plan is not None and (plan.patterns or plan.operators)):
            self.module_only = compile_for_this_module_only(self.current)
        elif cached_plans is not None:
            try:
                self.module_only = compile_for_this_module_only(self.current)
            except PlanError as error:
                warn_of_stale_profile(error.what, self.current, self.options)
                return None
        return cached_plans

    def check_device(self) -> None:
        """Raise `DeviceError` if the graph is for another device than the present one."""
        if self.options.target is not None:
            check_target(self.options.target, self.device)

    def run_passes(self, cached_plans: Candidates | None) -> PrecisionGraph:
        """Return the lowered graph."""
        return rewrite(
            self.module,
            self.inputs,
            self.options,
            observed=_seen(self.current, self.options),
            unasked=cached_plans,
        )

    def record_operators(self, graph: PrecisionGraph) -> None:
        """Record the graph, and the default plan that it follows, in the log of the options."""
        note_default_plan(graph, self.current, self.options)
        record(graph, self.current, self.options, self.module, self.module_only)

    def watch_training(self, graph: PrecisionGraph) -> None:
        """Install the guard of DDP, and the optimizer hooks that check gradients and the plan."""
        compile_anew_where_split(self.inputs)
        numeric_guards.watch(graph, self.current.root)
        wait_for_a_step()

    def report_reuse(self, graph: PrecisionGraph) -> None:
        """Report code that Dynamo will not compile again, or will share between modules.

        Raises:
            PlanError: modules that share the code have different plans, and the option "strict" is
                set.
        """
        if not self.options.is_default and graph.operators("adjustable"):
            warn_at_the_limit(self.current)
        if not self.module_only:
            tell_of_shared_code(graph, self.current, graph.context.options)

    def prepare_kernels(self, graph: PrecisionGraph, fast_dropout: bool) -> str:
        """Compile the kernels of the graph; return the key of the decisions for torch's caches."""
        parts = [prepare(graph)]
        if fast_dropout:
            parts.append("fast_dropout")
        if self.options.activation_recompute:
            parts.append("activation_recompute")
        return " ".join(parts)

    def compile_module(self, graph: PrecisionGraph, fast_dropout: bool, cache_key: str) -> Compiled:
        """Return the code of the inner compiler, called with the inputs of Dynamo's graph."""
        options, device = self.options, self.device
        recompute = options.activation_recompute
        by_inductor = options.inner_backend == "inductor"
        # Casts are explicit by now, in the backward pass too, so it must not be traced under the
        # caller's autocast region.
        with (
            torch._functorch.config.patch(backward_pass_autocast="off"),
            inductor_config.tracing(device, cache_key),
            recompute_policy.settings() if recompute else nullcontext(),
            told(graph),
            cpu_kernels.laid_out_later() if by_inductor else nullcontext(),
        ):
            compiler = inner_compiler(
                options.inner_backend,
                device,
                fast_dropout=fast_dropout,
                cudagraphs=inductor_config.captures(options, device),
                activation_recompute=recompute,
            )
            lifted = lift(graph) if options.cache_quantized_weights else Lifted(device)
            return lifted.around(compiler(graph.module, [*self.inputs, *lifted.inputs]))

    def check_runs(self, compiled: Compiled, graph: PrecisionGraph) -> Compiled:
        """Return compiled code that reports unsupported derivatives and plans that do not apply."""
        result, root = telling(compiled, graph, self.options.inner_backend), self.current.root
        if root is None or not _starts_model(self.current):
            return result
        trains = graph.context.training and root.training
        return result if trains else settle_when_called_again(result, root, self.options)


def _starts_model(current: SourcePlace) -> bool:
    """Return whether a graph is the first one of the compiled model."""
    return current.entered and current.resumes_at is None and not current.nested


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
    return _starts_model(current) and reason is not None and not reason.graph_break
