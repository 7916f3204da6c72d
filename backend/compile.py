"""Compilation of a Dynamo graph: pass pipeline and inner compiler.

The inner compiler receives a plain fx.GraphModule of ATen and `qsync::` operators. Invariant:
compiled code has the signature and the result types of Dynamo's graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from qsync_fx import torch_internals as internals
from qsync_fx.backend import numeric_guards, operators
from qsync_fx.backend.dynamo_hooks import (
    compile_anew_where_split,
    record,
    report_skipped,
    tell_of_shared_code,
)
from qsync_fx.backend.inductor import decompositions, inductor_config, layouts, recompute_policy
from qsync_fx.backend.memory_budget import WithinBudget
from qsync_fx.backend.numeric_guards import telling, widened
from qsync_fx.backend.operators import products_in_fp32
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
    ApplyCachedPlan,
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
    unasked: ApplyCachedPlan | None = None,
) -> PrecisionGraph:
    """Run the pipeline on a Dynamo graph, while Dynamo compiles.

    Args:
        instruments: observers of the passes.
        observed: operators of the model's other graphs.
        unasked: plans of cached profiles that may apply to the model.
    """
    device = _device(module, inputs)
    with targeted(options.target, device), _unhooked():
        context = context_for(module, inputs, options, observed)
        fakes = _fake(inputs, context.fake_mode)
        steps = pipeline(options, operators.lowerings(), context.training)
        passes = with_cached_plan(steps, unasked)
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
    for why in unasked.stale if unasked else ():
        warn_of_stale_profile(why, place(options), options)
    return graph


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Run the pipeline and compile the result with the inner compiler."""
    if in_backward_pass():
        return _compile_backward(module, inputs, options)
    return CompilationSession(module, inputs, options).run()


class CompilationSession:
    """Compilation of one Dynamo graph, by the steps of `run`, while Dynamo compiles a frame.

    Most steps have effects outside the graph, so their order is a contract:

    1. `restrict_reuse` decides which cached plans `rewrite` may use, and whether the code is for
       one module only. It and `check_target` raise for plans and devices that cannot be followed,
       so they precede the record of operators.
    2. `rewrite` makes the lowered graph, which all later steps read. It reads the operators of the
       model's earlier graphs from the log, so it precedes `record`.
    3. `record` writes the graph to the log of the options, and installs guards and hooks. The check
       of the first training step and later graphs of the model read the log.
    4. `report_reuse` warns, or raises with the option "strict", before time is spent on kernels.
    5. `prepare` compiles the kernels. Tracing in `compile_module` selects among those that did
       compile, under a cache key that identifies them. The quantizers of weights are among them, so
       this step precedes the lift of weight quantization in `compile_module`.
    6. `compile_module` runs the inner compiler. `check_runs` wraps its result.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> None:
        self.module, self.inputs, self.options = module, inputs, options
        self.current, self.device = place(options), _device(module, inputs)
        self.module_only = False

    def run(self) -> Compiled:
        """Return the compiled code; the class describes the order of the steps."""
        options = self.options
        cached_plans = self.restrict_reuse()
        if options.target is not None:
            check_target(options.target, self.device)
        graph = rewrite(
            self.module,
            self.inputs,
            options,
            observed=_earlier_operators(self.current, options),
            unasked=cached_plans,
        )
        self.record(graph)
        self.report_reuse(graph)
        fast_dropout = decompositions.serves(graph)
        kernels = prepare(graph)
        compiled = self.compile_module(graph, fast_dropout, kernels)
        return self.check_runs(compiled, graph)

    def restrict_reuse(self) -> ApplyCachedPlan | None:
        """Guard the code against reuse for other modules, and return the usable cached plans.

        Raise `PlanError` if modules need more code than Dynamo's recompile limit. For cached plans
        it is a warning, and they are not used.
        """
        plan, cached_plans = self.options.plan, candidates(self.current, self.options, self.device)
        names_modules = plan is not None and (plan.patterns or plan.operators)
        required = bool(self.options.passes or names_modules)
        if not required and cached_plans is None:
            return None
        try:
            self.module_only = compile_for_this_module_only(self.current)
        except PlanError as error:
            if required:
                raise
            warn_of_stale_profile(error.what, self.current, self.options)
            return None
        return cached_plans

    def record(self, graph: PrecisionGraph) -> None:
        """Write the graph to the log, and watch its model's training."""
        note_default_plan(graph, self.current, self.options)
        record(graph, self.current, self.options, self.module, self.module_only)
        compile_anew_where_split(self.inputs)
        numeric_guards.watch(graph, self.current.root)
        wait_for_a_step()

    def report_reuse(self, graph: PrecisionGraph) -> None:
        """Report code that Dynamo will not compile again, or will share between modules."""
        if not self.options.is_default and graph.operators("adjustable"):
            warn_at_the_limit(self.current)
        if not self.module_only:
            tell_of_shared_code(graph, self.current, graph.context.options)

    def compile_module(self, graph: PrecisionGraph, fast_dropout: bool, kernels: str) -> Compiled:
        """Return the code of the inner compiler, called with the inputs of Dynamo's graph."""
        options, device = self.options, self.device
        recompute, budget = options.activation_recompute, options.active_memory_budget
        parts = kernels, "fast_dropout" * fast_dropout, "activation_recompute" * recompute
        with contextlib.ExitStack() as settings:
            # Casts are explicit by now, in the backward pass too, so it must not be traced under
            # the caller's autocast region.
            settings.enter_context(internals.functorch_config.patch(backward_pass_autocast="off"))
            settings.enter_context(inductor_config.tracing(device, " ".join(filter(None, parts))))
            if recompute:
                settings.enter_context(recompute_policy.settings())
            settings.enter_context(report_skipped(graph))
            if options.inner_backend == "inductor":
                settings.enter_context(cpu_kernels.laid_out_later())
            compiler = inner_compiler(
                options.inner_backend,
                device,
                fast_dropout=fast_dropout,
                cudagraphs=inductor_config.captures(options, device),
                activation_recompute=recompute,
                memory_budget=budget,
            )
            lifted = lift(graph) if options.cache_quantized_weights else Lifted(device)
            return lifted.around(compiler(graph.module, [*self.inputs, *lifted.inputs]))

    def check_runs(self, compiled: Compiled, graph: PrecisionGraph) -> Compiled:
        """Return compiled code that reports unsupported derivatives and plans that do not apply."""
        result, root = telling(compiled, graph, self.options.inner_backend), self.current.root
        trains = graph.context.training and root is not None and root.training
        if root is None or trains or not _starts_model(self.current):
            return result
        return settle_when_called_again(result, root, self.options)


def _starts_model(current: SourcePlace) -> bool:
    """Return whether a graph is the first one of the compiled model."""
    return current.entered and current.resumes_at is None and not current.nested


def _compile_backward(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a backward pass of compiled autograd, whose formats the forward pass determined."""
    device = _device(module, internals.tree_leaves(list(inputs)))
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
    memory_budget: float | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return the compiler of the rewritten graph: "inductor", "aot_eager" or "eager"."""
    settings: dict[str, Any] = {}
    if name == "inductor":
        inductor_config.register_with_inductor()
        patches = inductor_config.inductor(device, cudagraphs, activation_recompute, memory_budget)
        settings = {
            "inner_compile": inductor_config.remembering(internals.compile_fx_inner),
            "decompositions": decompositions.for_inductor(
                device, fast_dropout, activation_recompute
            ),
        }

    def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if name == "inductor":
            settings["config_patches"] = patches | layouts.settings(device, module)
        elif device.type == "cuda":
            widened(module)
        if name == "eager":
            return module.forward
        if name == "aot_eager":
            return _aot_eager(device, memory_budget)(module, list(inputs))
        result: Any = internals.lookup_backend(name)
        return result(module, list(inputs), **settings)

    return compiled


def _aot_eager(device: torch.device, memory_budget: float | None) -> Any:
    """Return torch's backend of this name, with a memory budget and our decompositions."""
    partition: Any = internals.min_cut_rematerialization_partition
    table = products_in_fp32.decompositions({}) if products_in_fp32.widened(device) else None
    if memory_budget is not None and memory_budget < 1:
        partition = WithinBudget(memory_budget)
    return internals.aot_autograd(
        fw_compiler=internals.boxed_nop,
        bw_compiler=internals.boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
        decompositions=table,
    )


def context_for(
    module: fx.GraphModule, inputs: Sequence[Any], options: Options, observed: Iterable[OpId] = ()
) -> Context:
    """Return the context of the current compilation."""
    current, tracing = place(options), internals.TracingContext.try_get()
    device = _device(module, inputs)
    support(device, FP32)  # raises for an unsupported device
    ambient: tuple[bool, torch.dtype] | None = None
    modules: frozenset[str] | None = None
    if torch.is_autocast_enabled(device.type):
        ambient = True, torch.get_autocast_dtype(device.type)
    if current.root is not None and not current.within:
        # With a user-defined root path, the rest of the model is unknown.
        modules = frozenset(path for path, _ in current.modules.values())
    # DDP splits graphs without a reason, and Dynamo at graph breaks.
    reason = getattr(module, "compile_subgraph_reason", None)
    return Context(
        device=device,
        options=options,
        plan=active_plan(options, device),
        fake_mode=getattr(tracing, "fake_mode", None),
        ambient=ambient,
        training=torch.is_grad_enabled(),
        complete=_starts_model(current) and reason is not None and not reason.graph_break,
        earlier_operators=frozenset(observed),
        lowerings=operators.lowerings(),
        modules=modules,
    )


def _earlier_operators(current: SourcePlace, options: Options) -> list[OpId]:
    """Return the operators of earlier graphs of the model."""
    if current.root is None:
        return []
    frames = log_of(options).frames.values()
    return [op for frame in frames if frame.root() is current.root for op in frame.operators]


def _device(module: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    devices += [t.device for t in (*module.parameters(), *module.buffers())]
    accelerated = [device for device in devices if device.type != "cpu"]
    return (accelerated or devices or [torch.device("cpu")])[0]


def _fake(inputs: Sequence[Any], mode: internals.FakeTensorMode | None) -> list[Any]:
    """Return fake tensors with the symbolic sizes that Dynamo assigned to the inputs."""
    tracing: Any = internals.TracingContext.try_get()
    if mode is None or tracing is None:
        return list(inputs)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, internals.FakeTensor):
            return value
        symbolic = tracing.tensor_to_context.get(value)
        source = getattr(symbolic, "tensor_source", None)
        sizes: dict[str, Any] = {"symbolic_context": symbolic, "static_shapes": symbolic is None}
        return mode.from_tensor(value, source=source, **sizes)

    return [fake(value) for value in inputs]


def _unhooked() -> AbstractContextManager[object]:
    """Shield tracing from saved-tensor hooks of the compiled code, as checkpointing has them."""
    if not internals._saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()  # functorch, for example, forbids such hooks
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
