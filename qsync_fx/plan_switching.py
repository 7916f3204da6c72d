"""Another plan in the middle of training.

Dynamo keeps compiled code beside the function that was compiled and asks two things of it: do its guards hold, and is its backend equal to
the one in force. So a plan is switched by putting another backend in force, in place, and everything that refers to the compiled
model goes on doing so. Backends are equal where their options are, so the code of a plan that was used before is found again.

Invariant: switching changes what `torch.compile` was told of the plan, and nothing else: no parameter, no other option, no random number.
Dynamo keeps its limit of versions (`recompile_limit`) for every plan: neither is one compiled no more because there were others, nor is
what was compiled for one thrown away.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from qsync_fx.coverage.first_step_check import wait_for_a_step
from qsync_fx.errors import OptionError
from qsync_fx.options import Options
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.plan_loading import HoldsPlan, given_plan, part_of_this_process, read_plan
from qsync_fx.serialization import Path

Model = TypeVar("Model", bound=Callable[..., Any])


def switch_plan(model: Model, plan: Plan | ClusterPlan | HoldsPlan | Path | None) -> Model:
    """Puts another plan in force for a compiled model; returns the model, which is the same object.

    The next call compiles once, or not at all where an equal plan was in force before. Parameters, optimizer, random numbers and
    all other options stay.

    Args:
        model: what `torch.compile(..., backend="qsync")` returned, a module that was compiled by its own method `compile`, or a module
            with such ones inside, as `DistributedDataParallel` is; all of them are switched.
        plan: a plan, also one for a cluster, what find_plan returned, or the path of one; None to let the device decide, as with no plan
            given.

    Raises:
        OptionError: the model is not compiled with the backend, or the plan is none.
        PlanError: the file cannot be read. A plan that does not fit the model is told when the model is called next.
    """
    result = {id(context): context for context in _contexts(model)}
    if not result:
        raise OptionError(
            f"this {type(model).__name__} is not compiled with the backend qsync",
            where="qsync_fx.switch_plan",
            do='give what torch.compile(model, backend="qsync") returned, or a module that holds it',
        )
    inputs = read_plan(plan) if isinstance(plan, str | os.PathLike) else given_plan(plan)
    parts = [(context, _part(context, inputs)) for context in result.values()]
    for context, part in parts:
        _put_in_force(context, part)
    return model


def options_of(model: Callable[..., Any]) -> list[Options]:
    """Returns the options in force for what is compiled in a model, or is the model; none where nothing is."""
    return [_in_force(context) for context in _contexts(model)]


def when_called(model: Callable[..., Any], hook: Callable[[], None]) -> Callable[[], None]:
    """Calls a hook before each call of what is compiled in a model, or is the model; returns what takes it away again.

    Hooks of modules would be compiled with them, where they are compiled in place.
    """

    def enter() -> Callable[[], None]:
        hook()
        return _nothing

    contexts = list({id(context): context for context in _contexts(model)}.values())
    for context in contexts:
        context.enter_exit_hooks.append(enter)

    def remove() -> None:
        for context in contexts:
            context.enter_exit_hooks.remove(enter)

    return remove


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _RoomForPlans:
    """Gives every plan that was in force Dynamo's limit of versions; Dynamo calls it around each call of the compiled model.

    Attributes:
        backends: one a plan.
    """

    backends: list[Any]

    def __call__(self) -> Callable[[], None]:
        config, plans = torch._dynamo.config, len(self.backends)
        patch = config.patch(
            recompile_limit=plans * config.recompile_limit,
            accumulated_recompile_limit=plans * config.accumulated_recompile_limit,
        )
        patch.__enter__()
        return lambda: patch.__exit__(None, None, None)


def _put_in_force(context: Any, plan: Plan | None) -> None:
    from torch._dynamo.eval_frame import get_compiler_fn, innermost_backend

    backend: Any = innermost_backend(context.callback)
    room = next(
        (hook for hook in context.enter_exit_hooks if isinstance(hook, _RoomForPlans)), None
    )
    if room is None:
        room = _RoomForPlans([backend])
        context.enter_exit_hooks.append(room)
    wanted = copy.copy(backend)
    wanted.kwargs = {"options": _options(room.backends[0].kwargs["options"], plan)}
    available = next((other for other in room.backends if other == wanted), None)
    if available is None:
        room.backends.append(wanted)
    frames = context.callback._torchdynamo_orig_backend
    context.callback._torchdynamo_orig_backend = frames._clone_with_backend(
        get_compiler_fn(available or wanted)
    )
    context.callback.put_in_force(wanted.kwargs["options"])
    wait_for_a_step()
    _compile_again(room.backends)


def _part(context: Any, plan: object) -> Plan | None:
    """Returns the plan for this rank, by the class that the model was compiled with."""
    if not isinstance(plan, ClusterPlan):
        return Options.parse({} if plan is None else {"plan": plan}).plan
    return part_of_this_process(plan, _in_force(context).device_class)


def _in_force(context: Any) -> Options:
    from torch._dynamo.eval_frame import innermost_backend

    backend: Any = innermost_backend(context.callback)
    result: Options = backend.kwargs["options"]
    return result


def _options(first: Options, plan: Plan | None) -> Options:
    """Returns the options that the model was compiled with first, with another plan, in the words that were used then."""
    if (
        first.precision is not None
        and plan is not None
        and plan.default is not None
        and plan == Plan.uniform(plan.default)
    ):
        return replace(first, precision=plan.default.name, plan=None)
    return replace(first, precision=None, plan=plan)


def _compile_again(backends: list[Any]) -> None:
    """Takes back that Dynamo compiles a function no more, as it decides for all plans once one has reached the limit."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    as_others = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.DEFAULT, eval_frame._FrameAction.DEFAULT
    )
    for code in (reference() for reference in input_codes.seen):
        if code is not None and any(
            entry.backend in backends for entry in _debug_get_cache_entry_list(code)
        ):
            eval_frame.set_code_exec_strategy(code, as_others)


def _contexts(model: Any) -> Iterator[Any]:
    """Yields what torch.compile has put around a model and the modules in it, where the backend is ours."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    from qsync_fx.backend.entry import qsync

    result = [_context(model)]
    for module in model.modules() if isinstance(model, nn.Module) else ():
        owned = (
            module.dynamo_ctx
            if isinstance(module, OptimizedModule)
            else _context(module._compiled_call_impl)
        )
        result += [owned, _context(module.forward)]
    for context in result:
        callback = getattr(context, "callback", None)
        if (
            callable(callback)
            and getattr(innermost_backend(callback), "compiler_fn", None) is qsync
        ):
            yield context


def _context(function: Any) -> Any:
    """Returns what torch.compile has put around a function; None for a function that is not compiled."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or not hasattr(
        function, "_torchdynamo_orig_callable"
    ):
        return None
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return next(
        (cell.cell_contents for name, cell in zip(names, cells, strict=True) if name == "self"),
        None,
    )
