"""What torch.compile is asked for with this backend, and what Dynamo makes of each frame.

Dynamo calls a backend only where there is a graph. That a model makes none (a mode is active, its class is one that Dynamo leaves to
Python, a forward pass cannot be traced) is known to Dynamo's callback alone, so `install` puts one of ours in its place: the same
class with its results noted down. Invariant: what Dynamo compiles it compiles here, and beyond that the classes of torch's own that hold
layers, which it leaves to Python for their file alone; compilations with other backends are not touched.

`OptimizeContext.__call__` is where torch.compile, as a function, a decorator or `nn.Module.compile`, puts its callback around what
it is given. It has been there since torch 2.0, and tests pin what is used of it.

What Dynamo makes of a model around the backend: which frames it compiles, passes over or fails at, and whose code it uses again.

Invariant: nothing here changes a graph; what keeps a plan from being followed is told.

Code that was compiled outside of DistributedDataParallel is not run inside.

Inside, torch splits graphs where buckets of gradients end, so that each bucket is sent while the backward pass goes on. Dynamo does not
look for that when it has code for a function: a model that has made a step before it is wrapped would keep the code of one whole graph,
whose gradients come out together when all is computed, and nothing of them would travel meanwhile. torch's own backends train like that.

Invariant: what is compiled inside stays, wherever it runs, and so does what fits into one bucket.

Notes down what a graph holds when it is compiled: its operators, as the passes decided, and the modules that they belong to.

Invariant: a module is held by a graph where one of its parameters is an input, or an operator has its path: modules whose parameters
another one uses (tied weights, the projection of an attention layer) are held as much as those that are called.

Code that Dynamo uses for several modules of a model, and that a plan treats differently.

A function that has its module in hand is compiled for that module alone. What follows a graph break may have let go of it, and a helper
never had it: then Dynamo uses the code of one layer for those alike. Invariant: where a plan would have them differ, that is said.

A graph that the inner compiler passes over: Inductor does so with BF16 on GPUs before Ampere.

Invariant: Dynamo would run the frame as it was written, without the plan and without a word. Where something was planned that is an error;
else it is what torch.compile does, and is said once for each place in the model.

Errors that Dynamo suppresses, where `torch._dynamo.config.suppress_errors` asks for it: it then runs the frame as it was written.

Invariant: where a plan was given, an error that keeps a graph from being compiled reaches the user nevertheless. Without one it is
suppressed, with Dynamo's own words in the log.
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
from pathlib import Path
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

from qsync_fx.coverage.causes import tell_of_a_limit
from qsync_fx.coverage.compilation_log import (
    Frame,
    Log,
    Outcome,
    Ran,
    below,
    converting,
    log_of,
    note_graph,
    shape_of,
)
from qsync_fx.coverage.first_step_check import settle_packed, wait_for_a_step
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

_SAYS: Final = "DistributedDataParallel does not split the graph where it runs, or has split it"


def compile_anew_where_split(inputs: Sequence[Any]) -> None:
    """Lets Dynamo compile what it compiles now once more where DistributedDataParallel would split it; called while it compiles.

    Args:
        inputs: of the graph, parameters among them.
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
    """Notes down `graph`, made of Dynamo's `module`, in the log of `options`; `alone` where the code is for one module only."""
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
            note_graph(frame, current.root or root, path, inside, live)


def _roots(current: SourcePlace) -> Iterator[tuple[str, nn.Module]]:
    if current.module is not None:
        yield current.path, current.module
    else:
        yield from ((path, unwrapped(module)) for path, module in current.given)


def _ran(operator: Operator) -> Ran:
    note, source = operator.note, operator.source
    line = f"{Path(source.file).name}:{source.line}" if source else ""
    return Ran(note.id, note.kind, note.planned, note.precision, note.output, operator.reason, line)


def _tensors(module: fx.GraphModule) -> set[int]:
    """The addresses of the tensors that the compilation under way reads: parameters are inputs of Dynamo's graphs, or held by them."""
    tx = translator()
    inputs = (
        [argument.example for argument in tx.output.graphargs if argument.is_tensor]
        if tx is not None
        else []
    )
    return {id(t) for t in (*inputs, *module.parameters()) if isinstance(t, torch.Tensor)}


def tell_of_shared_code(graph: PrecisionGraph, current: SourcePlace, options: Options) -> None:
    """Warns where a graph decides for operators of other modules too, which the plan decides on otherwise.

    Raises:
        PlanError: that is so, and the option "strict" is set.
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
        f"code that Dynamo uses for {len(list(_alike(operator, current))) + 1} modules alike runs {operator.id} in "
        f"{operator.note.planned}, and so {other} too, which the plan wants in {choice.precision if choice else 'no precision'}",
        where=f"{current.code.co_qualname}, {current.code.co_filename}:{current.code.co_firstlineno}; {operator.where}",
        do="remove the graph break before it (TORCH_LOGS=graph_breaks shows it), use the module (self) after the break too, so that each "
        "has code of its own, or plan one precision for all",
    )
    if options.strict:
        raise error
    warnings.warn_explicit(
        str(error), PlanWarning, current.code.co_filename, current.code.co_firstlineno
    )


def _alike(operator: Operator, current: SourcePlace) -> Iterator[OpId]:
    """Yields the ids that an operator has in other modules that may run its code."""
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
    """Compiles `graph` within; raises `DeviceError` where it is passed over and was planned."""
    try:
        yield
    except (SkipFrame, BackendCompilerFailed) as error:
        # Where its cache is passed by, Inductor takes the request to skip a frame for an error of its own (torch 2.13).
        requested = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if not isinstance(requested, SkipFrame):
            raise
        context = graph.context
        message = f"{context.options.inner_backend} does not compile this graph for {context.device}: {requested}"
        if not context.automatic:
            raise DeviceError(
                f"{message}; it would run as the model is written, without the plan",
                where=graph.where,
                do="hold the model and its inputs in FP32 or FP16 there, and let the plan choose what is narrower",
            ) from error
        warnings.warn(f"{message}; it runs uncompiled ({graph.where})", UserWarning, stacklevel=2)
        raise requested from None


_thread = threading.local()


@contextlib.contextmanager
def failures() -> Iterator[list[Exception]]:
    """Yields the list of what graphs fail with while Dynamo converts a frame."""
    before, _thread.failed = getattr(_thread, "failed", None), []
    try:
        yield _thread.failed
    finally:
        _thread.failed = before


def note(error: Exception) -> None:
    """Notes that a graph has failed to compile; requests to skip a frame or to trace it anew are no failures."""
    failed = getattr(_thread, "failed", None)
    if failed is not None and not isinstance(error, (SkipFrame, RestartAnalysis)):
        failed.append(error)


def tell_of_failures(failed: list[Exception], code: CodeType, options: Options) -> None:
    """Raises what Dynamo has suppressed for a frame that it then left to Python, where a plan was given."""
    if not failed or options.is_default or not torch._dynamo.config.suppress_errors:
        return
    error = failed[-1]
    if isinstance(error, QSyncError):
        raise error
    raise PlanError(
        f"a graph of {code.co_qualname} cannot be compiled, and would run as the model is written, without the plan: "
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        where=f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}",
        do="set torch._dynamo.config.suppress_errors = False to see the whole error, or leave the module out of what is compiled",
    ) from error


_REASONS = ("graph_break", "unimplemented")
"""Where Dynamo counts its reasons: a break that leaves a whole frame to Python is none of the first kind."""

_RESUMES = "torch_dynamo_resume_in"


def install(backend: Callable[..., Any], options_of: Callable[[dict[str, Any]], Options]) -> None:
    """Lets `backend` know from now on what torch.compile is asked for.

    Args:
        backend: a function as torch.compile takes it.
        options_of: gives what a user's keyword arguments for the backend mean; raises where they mean nothing.
    """
    original = OptimizeContext.__call__

    @functools.wraps(original)
    def call(self: OptimizeContext, fn: Any) -> Any:
        compiler: Any = innermost_backend(self.callback)  # type: ignore[arg-type]
        if getattr(compiler, "compiler_fn", None) is backend:
            # torch keeps the user's dictionary: it is read once, here, and not changed.
            compiler.kwargs = {"options": options_of(compiler.kwargs)}
            observe(self, fn, compiler.kwargs["options"])
            wait_for_a_step()
        return original(self, fn)

    OptimizeContext.__call__ = call  # type: ignore[method-assign]


def observe(context: OptimizeContext, value: Any, options: Options) -> None:
    """Notes from now on what Dynamo makes of what torch.compile is given, in the log of `options`."""
    if type(context.callback) is CatchErrorsWrapper:
        callback: Any = context.callback
        callback.__class__ = ObservedGraphs
        module = given_to_compile(value)
        callback.qsync_given = (
            weakref.ref(unwrapped(module)) if isinstance(module, nn.Module) else None
        )
        callback.put_in_force(options)


class ObservedGraphs(CatchErrorsWrapper):
    """Dynamo's callback for a frame that has no compiled code yet.

    Attributes:
        qsync_options: those in force.
        qsync_given: the module that torch.compile was given; None for a function.
    """

    qsync_options: Options
    qsync_given: weakref.ref[nn.Module] | None

    def put_in_force(self, options: Options) -> None:
        """Takes other options from now on."""
        self.qsync_options = options
        module = self.qsync_given() if self.qsync_given is not None else None
        if module is not None:
            log_of(options).declare(module, options.root or "")

    def __getstate__(self) -> dict[str, Any]:
        """A reference cannot be pickled, and a copy of the model is another one."""
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
    # Before 2.13 torch gives no reason for a frame that it does not look at.
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
    """The modules whose forward pass a frame is a part of, or may call; none for helper functions, which tell nothing of a module."""
    code, local = frame.f_code, frame.f_locals
    first = local.get(code.co_varnames[0]) if code.co_argcount else None
    inside = around.inside or ([around.compiled] if isinstance(around.compiled, nn.Module) else [])
    owned = around.entered(code) or _RESUMES in code.co_name
    if code.co_filename == nn.modules.module.__file__:
        return []  # Dynamo leaves these to Python, always
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
    """Whether a frame is the forward of a class of torch's own with layers in it, which Dynamo leaves to Python for its file alone."""
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
    """Dynamo counts a reason once by its first line alone and once in full."""
    return [
        text
        for text in dict.fromkeys(texts)
        if not any(other != text and other.startswith(text) for other in texts)
    ]
