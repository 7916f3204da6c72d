"""Plan switching during training.

Dynamo stores compiled code with the function, and uses it if its guards pass and its backend equals
the active backend. A plan is switched by replacing the active backend in place, so all references
to the compiled model stay valid. Backends are equal if their options are equal, so code that was
compiled for an earlier plan is found again.

Invariant: only the plan of the compiled model changes: no parameter, other option or random state.
Dynamo's limit of versions (`recompile_limit`) applies to each plan separately, and code of earlier
plans is not discarded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from qsync_fx import torch_internals as internals
from qsync_fx.coverage.first_step_check import wait_for_a_step
from qsync_fx.errors import OptionError
from qsync_fx.options import Options
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import DevicePlan, given_plan, part_of_this_process, read_plan

Model = TypeVar("Model", bound=Callable[..., Any])
_switches = 0


def switch_plan(model: Model, plan: DevicePlan | ClusterPlan | None) -> Model:
    """Activate another plan for a compiled model, and return the same model object.

    The next call compiles once, or not at all if an equal plan was active before. Parameters,
    optimizer, random state and all other options do not change.

    Args:
        model: the result of `torch.compile(..., backend="qsync")`, a module compiled by its method
            `compile`, or a module that contains such modules, which are all switched.
        plan: a plan or cluster plan, the result of find_plan, or the path of a file; None for the
            default precision of the device.

    Raises:
        OptionError: the model is not compiled with the backend, or `plan` has another type.
        PlanError: the file cannot be read; the next call of the model raises if it does not fit.
    """
    result = {id(context): context for context in _contexts(model)}
    if not result:
        message = f"the {type(model).__name__} is not compiled with the backend qsync"
        do = (
            'pass the result of torch.compile(model, backend="qsync"), or a module that contains it'
        )
        raise OptionError(message, where="qsync_fx.switch_plan", do=do)
    inputs = read_plan(plan) if isinstance(plan, str | os.PathLike) else given_plan(plan)
    parts = [(context, _part(context, inputs)) for context in result.values()]
    for context, part in parts:
        _put_in_force(context, part)
    return model


def options_of(model: Callable[..., Any]) -> list[Options]:
    """Return the active options of all compiled regions in a model; empty without any."""
    return [_in_force(context) for context in _contexts(model)]


def switch_count() -> int:
    """Return the number of plan switches in this process, to notice the next one."""
    return _switches


def when_called(model: Callable[..., Any], hook: Callable[[], None]) -> Callable[[], None]:
    """Register a hook before each call of compiled regions in a model; return its removal function.

    Module hooks are no alternative, because they are compiled with a module that is compiled in
    place.
    """

    def enter() -> Callable[[], None]:
        hook()
        return lambda: None

    contexts = list({id(context): context for context in _contexts(model)}.values())
    for context in contexts:
        context.enter_exit_hooks.append(enter)

    def remove() -> None:
        for context in contexts:
            context.enter_exit_hooks.remove(enter)

    return remove


@dataclass(frozen=True)
class _RoomForPlans:
    """Hook that raises Dynamo's limit of versions by the number of plans, each with a backend."""

    backends: list[Any]

    def __call__(self) -> Callable[[], None]:
        config, plans = internals.dynamo_config, len(self.backends)
        patch = config.patch(
            recompile_limit=plans * config.recompile_limit,
            accumulated_recompile_limit=plans * config.accumulated_recompile_limit,
        )
        patch.__enter__()
        return lambda: patch.__exit__(None, None, None)


def _put_in_force(context: Any, plan: Plan | None) -> None:
    global _switches
    backend: Any = internals.innermost_backend(context.callback)
    rooms = (hook for hook in context.enter_exit_hooks if isinstance(hook, _RoomForPlans))
    room = next(rooms, None)
    if room is None:
        room = _RoomForPlans([backend])
        context.enter_exit_hooks.append(room)
    wanted = copy.copy(backend)
    wanted.kwargs = {"options": _options(room.backends[0].kwargs["options"], plan)}
    available = next((other for other in room.backends if other == wanted), None)
    if available is None:
        room.backends.append(wanted)
    else:
        available.kwargs = wanted.kwargs  # equal plans may have other notes
    frames = context.callback._torchdynamo_orig_backend
    context.callback._torchdynamo_orig_backend = frames._clone_with_backend(
        internals.get_compiler_fn(available or wanted)
    )
    context.callback.put_in_force(wanted.kwargs["options"])
    _switches += 1
    wait_for_a_step()
    _compile_again(room.backends)


def _part(context: Any, plan: object) -> Plan | None:
    """Return the plan for this rank, by the device class that the model was compiled with."""
    if isinstance(plan, ClusterPlan):
        return part_of_this_process(plan, _in_force(context).device_class)
    return Options.parse({"plan": plan}).plan


def _in_force(context: Any) -> Options:
    backend: Any = internals.innermost_backend(context.callback)
    result: Options = backend.kwargs["options"]
    return result


def _options(first: Options, plan: Plan | None) -> Options:
    """Return the model's first options with another plan.

    A uniform plan is written as `precision` if the first options had one, so that equal plans give
    equal options.
    """
    uniform = None if plan is None else plan.default
    if first.precision is not None and uniform is not None and plan == Plan.uniform(uniform):
        return replace(first, precision=uniform.name, plan=None)
    return replace(first, precision=None, plan=plan)


def _compile_again(backends: list[Any]) -> None:
    """Re-enable compilation of functions for which one plan has reached the limit of versions."""
    default = internals._FrameAction.DEFAULT
    strategy = internals._FrameExecStrategy(default, default)
    for code in filter(None, (reference() for reference in internals.input_codes.seen)):
        if any(entry.backend in backends for entry in internals._debug_get_cache_entry_list(code)):
            internals.set_code_exec_strategy(code, strategy)


def _contexts(model: Any) -> Iterator[Any]:
    """Yield the torch.compile contexts of a model and its modules with the backend "qsync"."""
    from qsync_fx.backend.entry import qsync

    contexts = [_context(model)]
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for module in modules:
        if isinstance(module, internals.OptimizedModule):
            contexts.append(module.dynamo_ctx)
        else:
            contexts.append(_context(module._compiled_call_impl))
        contexts.append(_context(module.forward))
    for context in contexts:
        callback = getattr(context, "callback", None)
        if not callable(callback):
            continue
        if getattr(internals.innermost_backend(callback), "compiler_fn", None) is qsync:
            yield context


def _context(function: Any) -> Any:
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or not hasattr(
        function, "_torchdynamo_orig_callable"
    ):
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "self"), None)
