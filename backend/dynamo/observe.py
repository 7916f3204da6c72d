"""What torch.compile is asked for with this backend, and what Dynamo makes of each frame.

Dynamo calls a backend only where there is a graph. That a model makes none (a mode is active, its class is one that Dynamo leaves to
Python, a forward pass cannot be traced) is known to Dynamo's callback alone, so `install` puts one of ours in its place: the same
class with its results noted down. Invariant: what Dynamo compiles it compiles here, and beyond that the classes of torch's own that hold
layers, which it leaves to Python for their file alone; compilations with other backends are not touched.

`OptimizeContext.__call__` is where torch.compile, as a function, a decorator or `nn.Module.compile`, puts its callback around what
it is given. It has been there since torch 2.0, and tests pin what is used of it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch._dynamo.config
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper, compile_lock
from torch._dynamo.eval_frame import OptimizeContext, innermost_backend
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from qsync_fx.backend.dynamo.suppressed import failures, tell_of_failures
from qsync_fx.coverage.limit import tell_of_a_limit
from qsync_fx.coverage.log import Frame, Log, Outcome, converting, log_of
from qsync_fx.coverage.settle import settle_packed, wait_for_a_step
from qsync_fx.module_tree import own_parameters, paths, unwrapped
from qsync_fx.options import Options
from qsync_fx.passes.tracing.frames import Calls, calls, given_to_compile, modules_in_reach

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


def observe(context: OptimizeContext, given: Any, options: Options) -> None:
    """Notes from now on what Dynamo makes of what torch.compile is given, in the log of `options`."""
    if type(context.callback) is CatchErrorsWrapper:
        callback: Any = context.callback
        callback.__class__ = Observed
        module = given_to_compile(given)
        callback.qsync_given = weakref.ref(unwrapped(module)) if isinstance(module, nn.Module) else None
        callback.put_in_force(options)


class Observed(CatchErrorsWrapper):
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
                    result = self._torchdynamo_orig_backend(frame, args[0], self.hooks, *args[1:], skip=1)
        new = {k: [text for text, n in counters[k].items() if n > before[k].get(text, 0)] for k in _REASONS}
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
    reason = getattr(result, "skip_reason", None) or ("torch dispatch mode" if is_in_torch_dispatch_mode() else None)
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
    own = around.entered(code) or _RESUMES in code.co_name
    if code.co_filename == nn.modules.module.__file__:
        return []  # Dynamo leaves these to Python, always
    if inside:
        own = own or (
            code.co_name == "forward" and isinstance(first, nn.Module) and unwrapped(first) is unwrapped(inside[0])
        )
        return [unwrapped(inside[0])] if own else []
    return [unwrapped(module) for _, module in modules_in_reach(code, local, frame.f_globals)] if own else []


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
        text for text in dict.fromkeys(texts) if not any(other != text and other.startswith(text) for other in texts)
    ]
