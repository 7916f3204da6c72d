"""What a loss keeps and takes that stands behind the compiled model, asked of the loss itself: it is computed and differentiated, and its
allocations are counted.

Invariant: the results count for as long as the loss needs them; of what is given nothing is changed.

The most bytes that torch's allocator holds while a step runs, to the byte.

On the CPU torch keeps no count of its own: the profiler's memory events are every allocation and every release, and their running sum is
what is held. Resident memory of the process would say what the system lends, not what a step needs.

Invariant: counted is what is held beyond what was held before the step. A release is seen only of what was allocated while events were
recorded, so the step runs twice in one recording, and the second run, which finds things as every later one does, counts.

What an optimizer keeps and takes, asked of the optimizer itself: one like it steps on small parameters, and its allocations are counted.

Invariant: the optimizer that is asked, its parameters and its state stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from qsync_fx import environment
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.memory.outside_passes import LossMemory, OptimizerMemory

_SECOND = "qsync_fx: the step whose memory is measured"


def measured_peak(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Returns the most bytes held at once while `step` runs, beyond those held before it.

    Args:
        step: runs one training step; it is called twice, so what it makes once, such as an optimizer's state, is not part of the step.
        device: what the bytes lie on.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return max(accumulate(memory_events(step)), default=0)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def memory_events(step: Callable[[], object]) -> list[int]:
    """Returns the bytes of each allocation, and with a minus of each release, of a step on the CPU, in the order of time."""
    recording = AllocationRecording()
    try:
        step()
        recording.second()
        step()
    finally:
        _, result = recording.stop()
    return result


class AllocationRecording:
    """Allocations and releases on the CPU from now on, in two parts; no other profiler may be on."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        # Kineto writes two lines for each recording on standard error, between lines of progress.
        with environment.default("KINETO_LOG_LEVEL", "6"):
            self._profiler.start()

    def second(self) -> None:
        """Begins the second part."""
        with record_function(_SECOND):
            pass

    def stop(self) -> tuple[list[int], list[int]]:
        """Returns the bytes of each allocation, and with a minus of each release, of both parts, in the order of time."""
        self._profiler.stop()
        recorded: Any = self._profiler.profiler
        events = recorded.kineto_results.events()
        begin = next(
            (event.start_ns() for event in events if event.name() == _SECOND), float("inf")
        )
        result = [
            event
            for event in events
            if event.name() == "[memory]" and event.device_type().name == "CPU"
        ]
        result.sort(key=lambda event: event.start_ns())
        first = [event.nbytes() for event in result if event.start_ns() < begin]
        return first, [event.nbytes() for event in result[len(first) :]]


def loss_memory(loss: Callable[..., Tensor], *results: Tensor) -> LossMemory:
    """Returns what a loss takes in bytes, on the CPU, where torch's allocator tells of each.

    Args:
        loss: computes it, a number, from results of the model.
        results: as large, and in the format, as the model returns them for the batches that it is trained with; what is in them does not
            matter.
    """
    leaves = [result.detach().clone().requires_grad_() for result in results]

    def once() -> tuple[Tensor, Sequence[Tensor | None]]:
        # Copies are its own, so that they go as soon as the loss lets go of them, as what a model returns does.
        number = loss(*(leaf.clone() for leaf in leaves))
        return number, autograd.grad(number, leaves, allow_unused=True)

    once()
    recording = AllocationRecording()
    try:
        recording.second()
        _value, gradients = once()  # both live at the end of the recording
        del gradients
    finally:
        _, events = recording.stop()
    return LossMemory(max(0, sum(events)), max(accumulate(events), default=0))


def loss_in_step(
    step: Callable[[Any, Any], Tensor], module: nn.Module, batch: object, returned: object
) -> LossMemory | None:
    """Returns what the loss of a user's step takes: all that the step computes from what the model returns.

    Args:
        step: takes the model and a batch, returns the loss. It runs twice, with a model that returns at once.
        returned: what the model returned for the batch.

    Returns:
        None where that cannot be found out: results have no gradients, are not tensors of the CPU in containers that torch knows, or the
        step needs more of a model than these.
    """
    leaves, spec = pytree.tree_flatten(returned)
    differentiated = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if not differentiated or any(leaf.device.type != "cpu" for leaf in differentiated.values()):
        return None

    def loss(*results: Tensor) -> Tensor:
        inputs = dict(zip(differentiated, results, strict=True))
        now = pytree.tree_unflatten([inputs.get(id(leaf), leaf) for leaf in leaves], spec)
        with _returning(module, now):
            return step(module, batch)

    try:
        return loss_memory(loss, *differentiated.values())
    except Exception:  # noqa: BLE001 - a step that runs with a model need not run without one, and raises what it likes
        return None


@contextmanager
def _returning(module: nn.Module, result: object) -> Iterator[None]:
    """Has a module return this whatever it is called with, and compute nothing."""
    live = vars(module)
    before = {name: live[name] for name in ("forward",) if name in live}
    live["forward"] = lambda *_, **__: result
    try:
        yield
    finally:
        del live["forward"]
        live.update(before)


_ELEMENTS = 16384


def optimizer_memory(optimizer: Optimizer) -> OptimizerMemory:
    """Returns what an optimizer takes, in FP32 values an element of a parameter.

    Raises:
        ProfileError: one like it cannot be made from its class and defaults, or does not step on parameters alone.
    """
    item, two, three = (_peak(optimizer, count) for count in (1, 2, 3))
    together = three[1] - two[1]
    return OptimizerMemory(
        state=item[0],
        temporary=item[1] - together,
        before=two[1] - item[1] - together,
        together=together,
    )


def known_memory(optimizer: Optimizer | None) -> OptimizerMemory | None:
    """Returns what an optimizer takes, nothing for none; None where that cannot be found out."""
    try:
        return OptimizerMemory() if optimizer is None else optimizer_memory(optimizer)
    except ProfileError:
        return None


def _peak(optimizer: Optimizer, count: int) -> tuple[float, float]:
    parameters = [torch.nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(count)]
    available = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in available}
    try:
        like = type(optimizer)(parameters, **settings)
        for parameter in parameters:
            parameter.grad = torch.ones(_ELEMENTS)
        like.step()
        used = measured_peak(like.step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(
            f"what a step of {type(optimizer).__name__} takes cannot be found out: {error}",
            do="give it: predictor.memory.OptimizerMemory",
        ) from error
    live = [
        value
        for state in like.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    state = sum(tensor.nbytes for tensor in live if tensor.numel() == _ELEMENTS) / count
    return state / _ELEMENTS / 4, round(used / _ELEMENTS / 4, 2)
