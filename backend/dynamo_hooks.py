"""Hooks into Dynamo: torch.compile arguments, results per frame, DDP guards, compile failures.

Dynamo calls a backend only if there is a graph. Only Dynamo's callback knows that a model yields
none (an active mode, a skipped class, an untraceable forward pass), so `install` replaces the class
of the callback with a recording subclass, via `OptimizeContext.__call__` (since torch 2.0; tests
pin it). Invariant: Dynamo compiles the same frames, plus forward passes of torch's own classes with
layers, which it skips only for their file. Other backends are unaffected, and no hook changes a
graph.

A plan that cannot be followed is never silently ignored: the hooks warn or raise.
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
from types import CodeType
from typing import Any, Final

import torch
import torch._dynamo.config
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper, compile_lock
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis, SkipFrame
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.utils import counters, get_optimize_ddp_mode
from torch._guards import Guard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from qsync_fx.coverage.compilation_log import (
    Frame,
    Log,
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

_SAYS: Final = "DistributedDataParallel does not split the graph here, or has already split it"


def compile_anew_where_split(inputs: Sequence[Any]) -> None:
    """Make Dynamo recompile the current code inside DistributedDataParallel if DDP would split it.

    DDP splits graphs at bucket boundaries, so that a bucket is reduced while the backward pass
    continues. Dynamo does not check for DDP once it has code for a function: a model that ran
    before it was wrapped would reuse the code of one full graph, whose gradients become available
    only at the end, without overlap. Code compiled inside DDP, and code whose gradients fit in one
    bucket, remains valid everywhere. Must be called while Dynamo compiles.

    Args:
        inputs: inputs of the graph, parameters among them.
    """
    gradients = sum(
        item.nbytes for item in inputs if isinstance(item, nn.Parameter) and item.requires_grad
    )
    if (
        not gradients
        or not torch.is_grad_enabled()
        or DistributedDataParallel._active_ddp_module is not None
    ):
        return

    def fits(_: object) -> bool:
        parallel = DistributedDataParallel._active_ddp_module
        return (
            parallel is None
            or gradients <= parallel.bucket_bytes_cap
            or get_optimize_ddp_mode() != "ddp_optimizer"
        )

    def outside_of_parallel(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(fits, [_SAYS], guard.user_stack)

    install_guard(Guard(GlobalStateSource(), outside_of_parallel))


def record(
    graph: PrecisionGraph,
    current: SourcePlace,
    options: Options,
    module: fx.GraphModule,
    alone: bool,
) -> None:
    """Record the operators of `graph` and the modules that they belong to in the log of `options`.

    A graph contains a module if one of its parameters is an input, or an operator has its path. So
    modules whose parameters another module uses (tied weights, the projection of an attention
    layer) count like called ones.

    Args:
        module: Dynamo's graph module of `graph`.
        alone: whether the code is for one module only.
    """
    if current.code is None:
        return
    operators = [_ran(operator) for operator in graph.operators()]
    tensors = _tensors(module)
    for path, root in _roots(current):
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


def _roots(current: SourcePlace) -> Iterator[tuple[str, nn.Module]]:
    if current.module is not None:
        yield current.path, current.module
    else:
        yield from ((path, unwrapped(module)) for path, module in current.given)


def _ran(operator: Operator) -> Ran:
    note, reason = operator.note, operator.reason
    formats = note.planned, note.precision, note.output
    return Ran(note.id, note.kind, *formats, reason, operator.line)


def _tensors(module: fx.GraphModule) -> set[int]:
    """Return the ids of the tensors that the current compilation reads.

    Parameters are inputs or attributes of Dynamo's graphs.
    """
    tx = translator()
    inputs = (
        [argument.example for argument in tx.output.graphargs if argument.is_tensor]
        if tx is not None
        else []
    )
    return {id(t) for t in (*inputs, *module.parameters()) if isinstance(t, torch.Tensor)}


def tell_of_shared_code(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Warn if a graph shares code with other modules, for which the plan decides differently.

    Dynamo compiles a function that references its module for that module only. The code after a
    graph break, and a helper, may not reference it; Dynamo then uses the code of one layer for all
    layers of the same kind.

    Raises:
        PlanError: in this case, if the option "strict" is set.
    """
    if options.plan is None or current.code is None or not current.nested or current.entered:
        return
    result = [
        (op, other)
        for op in graph.operators(Kind.ADJUSTABLE)
        for other in _alike(op, current)
        if _differs(graph, op, other)
    ]
    if not result:
        return
    operator, other = result[0]
    choice = graph.context.plan.precision_for(other)
    error = PlanError(
        f"Dynamo uses one compiled code for {len(list(_alike(operator, current))) + 1} equal "
        f"modules. It runs {operator.id} in {operator.note.planned}, and therefore {other} too, "
        f"for which the plan has {(choice.precision if choice else 'no precision')}",
        where=f"{current.code.co_qualname}, "
        f"{current.code.co_filename}:{current.code.co_firstlineno}; {operator.where}",
        do="remove the graph break before it (TORCH_LOGS=graph_breaks shows it), use the module "
        "(self) after the break, too, so that each module has its own code, or plan one "
        "precision for all of them",
    )
    if options.strict:
        raise error
    warnings.warn_explicit(
        str(error), PlanWarning, current.code.co_filename, current.code.co_firstlineno
    )


def _alike(operator: Operator, current: SourcePlace) -> Iterator[OpId]:
    """Yield the ids of an operator in other modules that may run its code."""
    assert current.root is not None and current.module is not None
    rest, shape = below(operator.id.module, current.path), shape_of(current.module)
    if rest is None:
        return
    for path, module in paths(current.root):
        if (
            module is not current.module
            and type(module) is type(current.module)
            and shape_of(module) == shape
        ):
            yield dataclasses.replace(
                operator.id, module=joined(joined(current.within, path), rest)
            )


def _differs(graph: PrecisionGraph, operator: Operator, other: OpId) -> bool:
    owned, wanted = (graph.context.plan.precision_for(op_id) for op_id in (operator.id, other))
    return (owned and owned.precision) != (wanted and wanted.precision)


@contextlib.contextmanager
def told(graph: PrecisionGraph) -> Iterator[None]:
    """Compile `graph` in this context, and report if the inner compiler skips it.

    Inductor skips BF16 graphs on GPUs before Ampere. Dynamo would then silently run the frame
    without the plan.

    Raises:
        DeviceError: the graph was skipped, and the user requested a plan or a precision. Otherwise
            it is a warning.
    """
    try:
        yield
    except (SkipFrame, BackendCompilerFailed) as error:
        # Without its cache, Inductor wraps the request to skip a frame as an error of its own
        # (torch 2.13).
        requested = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if not isinstance(requested, SkipFrame):
            raise
        context = graph.context
        message = (
            f"{context.options.inner_backend} does not compile this graph for "
            f"{context.device}: {requested}"
        )
        if not context.automatic:
            raise DeviceError(
                f"{message}; the model would run as written, without the plan",
                where=graph.where,
                do="keep the model and its inputs in FP32 or FP16 there, and let the plan choose "
                "narrower formats",
            ) from error
        warnings.warn(f"{message}; it runs uncompiled ({graph.where})", UserWarning, stacklevel=2)
        raise requested from None


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
    if failed is not None and not isinstance(error, (SkipFrame, RestartAnalysis)):
        failed.append(error)


def tell_of_failures(failed: list[Exception], code: CodeType, options: Options) -> None:
    """Raise an error that Dynamo suppressed and that would leave a frame with a plan to Python.

    With `torch._dynamo.config.suppress_errors`, Dynamo runs such a frame as written. Without a plan
    the error stays suppressed, and Dynamo logs it.
    """
    if not failed or options.is_default or not torch._dynamo.config.suppress_errors:
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
"""Dynamo's counters of reasons.

A break that leaves a whole frame to Python is not counted as "graph_break".
"""

_RESUMES = "torch_dynamo_resume_in"


def install(backend: Callable[..., Any], options_of: Callable[[dict[str, Any]], Options]) -> None:
    """Make the arguments of torch.compile available to `backend`.

    Args:
        backend: a backend function for torch.compile.
        options_of: converts a user's keyword arguments for the backend; raises if they are invalid.
    """
    original = OptimizeContext.__call__

    @functools.wraps(original)
    def call(self: OptimizeContext, fn: Any) -> Any:
        compiler: Any = innermost_backend(self.callback)  # type: ignore[arg-type]
        if getattr(compiler, "compiler_fn", None) is backend:
            # torch stores the user's dictionary: read it once, here, and do not change it.
            compiler.kwargs = {"options": options_of(compiler.kwargs)}
            observe(self, fn, compiler.kwargs["options"])
            wait_for_a_step()
        return original(self, fn)

    OptimizeContext.__call__ = call  # type: ignore[method-assign]


def observe(context: OptimizeContext, value: Any, options: Options) -> None:
    """Record Dynamo's results for the argument of torch.compile in the log of `options`."""
    if type(context.callback) is CatchErrorsWrapper:
        callback: Any = context.callback
        callback.__class__ = ObservedGraphs
        module = given_to_compile(value)
        callback.qsync_given = (
            weakref.ref(unwrapped(module)) if isinstance(module, nn.Module) else None
        )
        callback.put_in_force(options)


class ObservedGraphs(CatchErrorsWrapper):
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
        before = {kind: dict(counters[kind]) for kind in _REASONS}
        with converting() as touched, failures() as failed:
            result = super().__call__(frame, *args, **kwargs)
            if result.guarded_code is None and _holds_modules_of_torch(frame):
                with compile_lock, _disable_current_modes():
                    result = self._torchdynamo_orig_backend(
                        frame, args[0], self.hooks, *args[1:], skip=1
                    )
        new = {
            k: [text for text, n in counters[k].items() if n > before[k].get(text, 0)]
            for k in _REASONS
        }
        entries = touched or _entries(log, frame, around)
        _note(entries, result, new)
        settle_packed(entries, log)
        if result.guarded_code is None:
            tell_of_a_limit(frame.f_code, self.qsync_options, new["unimplemented"], entries)
            tell_of_failures(failed, frame.f_code, self.qsync_options)
        return result


def _entries(log: Log, frame: Any, around: Calls) -> list[Frame]:
    return [log.frame(frame.f_code, module) for module in _called_for(frame, around)]


def _note(entries: list[Frame], result: Any, new: dict[str, list[str]]) -> None:
    skipped = result.guarded_code is None
    # Before 2.13 torch reports no reason for a skipped frame.
    reason = getattr(result, "skip_reason", None) or (
        "torch dispatch mode" if is_in_torch_dispatch_mode() else None
    )
    texts = [*new["graph_break"], *(new["unimplemented"] if skipped else [])] or (
        [reason] if skipped and reason else []
    )
    for entry in {id(entry): entry for entry in entries}.values():
        entry.outcome = Outcome.SKIPPED if skipped else Outcome.BROKE if texts else Outcome.COMPILED
        entry.texts = tuple(_distinct(texts))


def _called_for(frame: Any, around: Calls) -> list[nn.Module]:
    """Return the modules whose forward pass contains or may call a frame.

    There are none for helper functions, which identify no module.
    """
    code, local = frame.f_code, frame.f_locals
    first = local.get(code.co_varnames[0]) if code.co_argcount else None
    inside = around.inside or ([around.compiled] if isinstance(around.compiled, nn.Module) else [])
    owned = around.entered(code) or _RESUMES in code.co_name
    if code.co_filename == nn.modules.module.__file__:
        return []  # Dynamo always leaves these to Python
    if inside:
        owned = owned or (
            code.co_name == "forward"
            and isinstance(first, nn.Module)
            and unwrapped(first) is unwrapped(inside[0])
        )
        return [unwrapped(inside[0])] if owned else []
    return (
        [unwrapped(module) for _, module in modules_in_reach(code, local, frame.f_globals)]
        if owned
        else []
    )


def _holds_modules_of_torch(frame: Any) -> bool:
    """Return whether a frame is a torch class's forward with layers, skipped for its file."""
    module = frame.f_locals.get("self")
    return (
        isinstance(module, nn.Module)
        and frame.f_code is getattr(type(module).forward, "__code__", None)
        and trace_rules.check(frame.f_code)
        and any(own_parameters(part) for path, part in paths(module) if path)
        and not is_in_torch_dispatch_mode()
        and not torch._dynamo.config.disable
        and DistributedDataParallel._get_active_ddp_module() is None  # type: ignore[no-untyped-call]
    )


def _distinct(texts: list[str]) -> list[str]:
    """Return distinct reasons: Dynamo counts a reason once by its first line and once in full."""
    return [
        text
        for text in dict.fromkeys(texts)
        if not any(other != text and other.startswith(text) for other in texts)
    ]
