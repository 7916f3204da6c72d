"""Hooks into Dynamo: registration, torch.compile arguments, results per frame, failures.

Only Dynamo's callback knows that a model yields no graph, so `install` replaces the class of the
callback with a recording subclass. Invariant: Dynamo compiles the same frames, plus forward passes
of torch's own classes with layers, which it skips only for their file. Other backends are
unaffected, and no hook changes a graph. Plans are never silently ignored: the hooks warn or raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from qsync_fx import torch_internals as internals
from qsync_fx.coverage.compilation_log import (
    Frame,
    Outcome,
    Ran,
    below,
    converting,
    log_of,
    shape_of,
)
from qsync_fx.coverage.first_step_check import settle_packed, tell_of_a_limit, wait_for_a_step
from qsync_fx.errors import DeviceError, PlanError, PlanWarning, QSyncError
from qsync_fx.graph.graph import Operator, PrecisionGraph
from qsync_fx.module_paths import joined, own_parameters, paths, unwrapped
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.passes.tracing.dynamo_frames import (
    Calls,
    SourcePlace,
    calls,
    given_to_compile,
    modules_in_reach,
    translator,
)
from qsync_fx.plan.operator_id import OpId

Backend = Callable[..., Any]


def register(backend: Backend, name: str) -> None:
    """Register a backend with torch; called while the module of its entry point is imported.

    torch registers it without a lock: of several threads, all but one would fail with "duplicate
    name". Registering the same function again under the same name has no effect.
    """
    # A thread that waits for this import has already read `register_backend`, so a replacement
    # function would come too late for it: its code object is replaced.
    internals.register_backend.__code__ = _registering_once.__code__
    backend._tags = ()  # type: ignore[attr-defined]
    # The function first: torch fails on a name that has neither a function nor an entry point.
    internals._COMPILER_FNS.setdefault(name, backend)
    internals._BACKENDS.setdefault(name, None)


def register_once(backend: Backend | None, name: str | None, tags: Sequence[str]) -> Any:
    """Call torch's `register_backend`, unless the name has this function already."""
    if backend is not None and internals._COMPILER_FNS.get(name or backend.__name__) is backend:
        return backend
    return _register_backend(backend, name, tags)


def _registering_once(compiler_fn: Any = None, name: Any = None, tags: Any = ()) -> Any:
    """Call `register_once`: the new code of torch's `register_backend`, with torch's globals."""
    from qsync_fx.backend.dynamo_hooks import register_once

    return register_once(compiler_fn, name, tags)


def _copied(function: Any) -> Any:
    """Return a function with the code that `function` had before this module was imported."""
    original = FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    return getattr(function, "__wrapped__", original)


_register_backend = internals.register_backend.__wrapped__ = _copied(internals.register_backend)  # type: ignore[attr-defined]


def compile_anew_where_split(inputs: Sequence[Any]) -> None:
    """Make Dynamo recompile the current code inside DistributedDataParallel if DDP would split it.

    Otherwise a model that ran before it was wrapped would reuse the code of one full graph, without
    overlap of reductions. `inputs` are those of the graph, parameters among them.
    """
    parameters = [item for item in inputs if isinstance(item, nn.Parameter) and item.requires_grad]
    gradients = sum(parameter.nbytes for parameter in parameters)
    inside = internals._get_active_ddp_module() is not None
    if not gradients or inside or not torch.is_grad_enabled():
        return

    def fits(_: object) -> bool:
        parallel = internals._get_active_ddp_module()
        if parallel is None or gradients <= parallel.bucket_bytes_cap:
            return True
        return internals.get_optimize_ddp_mode() != "ddp_optimizer"

    def outside_of_parallel(builder: Any, guard: internals.Guard) -> None:
        says = "DistributedDataParallel does not split the graph here, or has already split it"
        builder.guard_manager.root.add_lambda_guard(fits, [says], guard.user_stack)

    internals.install_guard(internals.Guard(internals.GlobalStateSource(), outside_of_parallel))


def record(
    graph: PrecisionGraph,
    current: SourcePlace,
    options: Options,
    module: fx.GraphModule,
    alone: bool,
) -> None:
    """Record the operators of `graph` and the modules that they belong to in the log of `options`.

    A graph contains a module if one of its parameters is an input, or an operator has its path.
    `module` is Dynamo's graph module. `alone`: the code is for one module only.
    """
    if current.code is None:
        return
    operators = [_ran(operator) for operator in graph.operators()]
    # Parameters are inputs or attributes of Dynamo's graphs.
    tensors = {id(parameter) for parameter in module.parameters()}
    if (tx := translator()) is not None:
        tensors |= {id(arg.example) for arg in tx.output.graphargs if arg.is_tensor}
    roots = [(path, unwrapped(part)) for path, part in current.called_modules]
    if current.module is not None:
        roots = [(current.path, current.module)]
    for path, root in roots:
        live = {
            name
            for name, part in paths(root)
            if any(id(p) in tensors for p in own_parameters(part))
        }
        inside = [ran for ran in operators if below(ran.id.module, path) is not None]
        live |= {rest for ran in inside if (rest := below(ran.id.module, path))}
        if current.root is not None or live:
            frame = log_of(options).frame(current.code, root)
            frame.alone = frame.alone or alone
            frame.root, frame.path = weakref.ref(current.root or root), path
            frame.operators.update({ran.id: ran for ran in inside})
            frame.covered.update(live)


def _ran(operator: Operator) -> Ran:
    note, reason = operator.note, operator.reason
    formats = note.planned, note.precision, note.output
    return Ran(note.id, note.kind, *formats, reason, operator.line)


def tell_of_shared_code(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Warn, or with "strict" raise, if a graph shares code with modules of another plan.

    Code after a graph break, and a helper, may not reference their module; Dynamo then uses the
    code of one layer for all layers of the same kind.
    """
    code, plan = current.code, graph.context.plan
    if options.plan is None or code is None or not current.nested or current.entered:
        return

    def planned(op_id: OpId) -> str:
        choice = plan.precision_for(op_id)
        return str(choice.precision) if choice else "no precision"

    for operator in graph.operators(Kind.ADJUSTABLE):
        others = list(_ids_with_equal_code(operator, current))
        other = next((op_id for op_id in others if planned(op_id) != planned(operator.id)), None)
        if other is not None:
            break
    else:
        return
    error = PlanError(
        f"Dynamo uses one compiled code for {len(others) + 1} equal modules. It runs "
        f"{operator.id} in {operator.note.planned}, and therefore {other} too, for which the plan "
        f"has {planned(other)}",
        where=f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}; {operator.where}",
        do="remove the graph break before it (TORCH_LOGS=graph_breaks shows it), use the module "
        "(self) after the break, too, so that each module has its own code, or plan one "
        "precision for all of them",
    )
    if options.strict:
        raise error
    warnings.warn_explicit(str(error), PlanWarning, code.co_filename, code.co_firstlineno)


def _ids_with_equal_code(operator: Operator, current: SourcePlace) -> Iterator[OpId]:
    """Yield the ids of an operator in other modules that may run its code."""
    compiled, root = current.module, current.root
    assert root is not None and compiled is not None
    rest = below(operator.id.module, current.path)
    if rest is None:
        return
    for path, module in paths(root):
        equal = type(module) is type(compiled) and shape_of(module) == shape_of(compiled)
        if equal and module is not compiled:
            outer = joined(current.within, path)
            yield dataclasses.replace(operator.id, module=joined(outer, rest))


@contextlib.contextmanager
def report_skipped(graph: PrecisionGraph) -> Iterator[None]:
    """Compile `graph` in this context, and report if the inner compiler skips it.

    Inductor skips BF16 graphs on GPUs before Ampere; Dynamo would then run the frame as written. It
    is a warning, or a `DeviceError` if the user requested a plan or a precision.
    """
    try:
        yield
    except (internals.SkipFrame, internals.BackendCompilerFailed) as error:
        # Without its cache, Inductor wraps the request to skip a frame as an error of its own
        # (torch 2.13).
        requested = getattr(error, "inner_exception", error)
        if not isinstance(requested, internals.SkipFrame):
            raise
        context = graph.context
        message = (
            f"{context.options.inner_backend} does not compile this graph for "
            f"{context.device}: {requested}"
        )
        if context.automatic:
            text = f"{message}; it runs uncompiled ({graph.where})"
            warnings.warn(text, UserWarning, stacklevel=2)
            raise requested from None
        raise DeviceError(
            f"{message}; the model would run as written, without the plan",
            where=graph.where,
            do="keep the model and its inputs in FP32 or FP16 there, and let the plan choose "
            "narrower formats",
        ) from error


_thread = threading.local()


@contextlib.contextmanager
def failures() -> Iterator[list[Exception]]:
    """Yield the list of errors of graphs while Dynamo converts a frame."""
    before, _thread.failed = getattr(_thread, "failed", None), []
    try:
        yield _thread.failed
    finally:
        _thread.failed = before


def note(error: Exception) -> None:
    """Record the failure of a graph; requests to skip or to retrace a frame do not count."""
    failed = getattr(_thread, "failed", None)
    if failed is not None and not isinstance(
        error, (internals.SkipFrame, internals.RestartAnalysis)
    ):
        failed.append(error)


def tell_of_failures(failed: list[Exception], code: CodeType, options: Options) -> None:
    """Raise an error that Dynamo suppressed and that would leave a frame with a plan to Python.

    With `torch._dynamo.config.suppress_errors`, Dynamo runs such a frame as written. Without a plan
    the error stays suppressed, and Dynamo logs it.
    """
    if not failed or options.is_default or not internals.dynamo_config.suppress_errors:
        return
    error = failed[-1]
    if isinstance(error, QSyncError):
        raise error
    raise PlanError(
        f"a graph of {code.co_qualname} cannot be compiled, and would run as written, without "
        f"the plan: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
        where=f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}",
        do="set torch._dynamo.config.suppress_errors = False to see the complete error, or do "
        "not compile this module",
    ) from error


_REASONS = ("graph_break", "unimplemented")
"""Dynamo's counters of reasons; a break that leaves a whole frame to Python is "unimplemented"."""


def install(backend: Callable[..., Any], options_of: Callable[[dict[str, Any]], Options]) -> None:
    """Read the user's keyword arguments for `backend` at torch.compile, by `options_of`."""
    original = internals.OptimizeContext.__call__

    @functools.wraps(original)
    def call(self: internals.OptimizeContext, fn: Any) -> Any:
        compiler: Any = internals.innermost_backend(self.callback)  # type: ignore[arg-type]
        if getattr(compiler, "compiler_fn", None) is backend:
            # torch stores the user's dictionary: read it once, here, and do not change it.
            compiler.kwargs = {"options": options_of(compiler.kwargs)}
            observe(self, fn, compiler.kwargs["options"])
            wait_for_a_step()
        return original(self, fn)

    internals.OptimizeContext.__call__ = call  # type: ignore[method-assign]


def observe(context: internals.OptimizeContext, value: Any, options: Options) -> None:
    """Record Dynamo's results for the argument of torch.compile in the log of `options`."""
    if type(context.callback) is internals.CatchErrorsWrapper:
        callback: Any = context.callback
        callback.__class__ = ObservedGraphs
        callback.qsync_given = None
        if isinstance(module := given_to_compile(value), nn.Module):
            callback.qsync_given = weakref.ref(unwrapped(module))
        callback.put_in_force(options)


class ObservedGraphs(internals.CatchErrorsWrapper):
    """Dynamo's callback for a frame without compiled code, which records the result.

    Attributes:
        qsync_options: the active options.
        qsync_given: the module that torch.compile received; None for a function.
    """

    qsync_options: Options
    qsync_given: weakref.ref[nn.Module] | None

    def put_in_force(self, options: Options) -> None:
        """Activate other options."""
        self.qsync_options = options
        module = self.qsync_given() if self.qsync_given is not None else None
        if module is not None:
            log_of(options).declare(module, options.root or "")

    def __getstate__(self) -> dict[str, Any]:
        """Omit the weak reference, which cannot be pickled; a copied model is another module."""
        return {**self.__dict__, "qsync_given": None}

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        log = log_of(self.qsync_options)
        around = calls(sys._getframe().f_back)
        before = {kind: dict(internals.counters[kind]) for kind in _REASONS}
        with converting() as touched, failures() as failed:
            result = super().__call__(frame, *args, **kwargs)
            if result.guarded_code is None and _holds_modules_of_torch(frame):
                with internals.compile_lock, internals._disable_current_modes():
                    result = self._torchdynamo_orig_backend(
                        frame, args[0], self.hooks, *args[1:], skip=1
                    )
        new = {
            k: [text for text, n in internals.counters[k].items() if n > before[k].get(text, 0)]
            for k in _REASONS
        }
        entries = touched or [log.frame(frame.f_code, m) for m in _called_for(frame, around)]
        _note(entries, result, new)
        settle_packed(entries, log)
        if result.guarded_code is None:
            tell_of_a_limit(frame.f_code, self.qsync_options, new["unimplemented"], entries)
            tell_of_failures(failed, frame.f_code, self.qsync_options)
        return result


def _note(entries: list[Frame], result: Any, new: dict[str, list[str]]) -> None:
    skipped, texts = result.guarded_code is None, [*new["graph_break"]]
    outcome = Outcome.BROKE if texts else Outcome.COMPILED
    if skipped:
        outcome = Outcome.SKIPPED
        # Before 2.13 torch reports no reason for a skipped frame.
        reason: Any = getattr(result, "skip_reason", None)
        if not reason and internals.is_in_torch_dispatch_mode():
            reason = "torch dispatch mode"
        texts = texts + new["unimplemented"] or [reason] * bool(reason)
    # Dynamo counts a reason once by its first line and once in full.
    short = {a for a in texts for b in texts if a != b and b.startswith(a)}
    for entry in entries:
        entry.outcome, entry.texts = (
            outcome,
            tuple(t for t in dict.fromkeys(texts) if t not in short),
        )


def _called_for(frame: Any, around: Calls) -> list[nn.Module]:
    """Return the modules whose forward pass contains or may call a frame; [] for helpers."""
    code, local = frame.f_code, frame.f_locals
    if code.co_filename == nn.modules.module.__file__:
        return []  # Dynamo always leaves these to Python
    inside = list(around.inside)
    if not inside and isinstance(around.compiled, nn.Module):
        inside.append(around.compiled)
    belongs = around.entered(code) or "torch_dynamo_resume_in" in code.co_name
    if inside and not belongs and code.co_name == "forward" and code.co_argcount:
        first = local.get(code.co_varnames[0])
        belongs = isinstance(first, nn.Module) and unwrapped(first) is unwrapped(inside[0])
    if not belongs:
        return []
    if not inside:
        inside = [module for _, module in modules_in_reach(code, local, frame.f_globals)]
        return [unwrapped(module) for module in inside]
    return [unwrapped(inside[0])]


def _holds_modules_of_torch(frame: Any) -> bool:
    """Return whether a frame is a torch class's forward with layers, skipped for its file."""
    module = frame.f_locals.get("self")
    return (
        isinstance(module, nn.Module)
        and frame.f_code is getattr(type(module).forward, "__code__", None)
        and internals.trace_rules.check(frame.f_code)
        and any(own_parameters(part) for path, part in paths(module) if path)
        and not internals.is_in_torch_dispatch_mode()
        and not internals.dynamo_config.disable
        and internals._get_active_ddp_module() is None
    )
