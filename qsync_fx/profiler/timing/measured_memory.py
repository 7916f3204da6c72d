"""Measured memory of a training step, a loss and an optimizer.

On the CPU, the running sum of the profiler's memory events gives the live bytes. The profiler
reports a release only if it recorded the allocation, so the second of two recorded steps counts.
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

from qsync_fx import environment
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.memory.peak_memory import LossMemory, OptimizerMemory
from qsync_fx.torch_internals import tree_flatten, tree_unflatten

_SECOND = "qsync_fx: the step whose memory is measured"


def measured_peak(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the peak memory of `step` in bytes, beyond the bytes live before it.

    Args:
        step: runs one training step; it is called twice, so one-time allocations are excluded.
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
    """Return the bytes of a step's CPU allocations, and negated of its releases, in time order."""
    recording = AllocationRecording()
    try:
        step()
        recording.second()
        step()
    finally:
        _, result = recording.stop()
    return result


class AllocationRecording:
    """Recording of CPU allocations and releases in two parts; excludes other profilers."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        # Otherwise Kineto logs two lines per recording to standard error.
        with environment.default("KINETO_LOG_LEVEL", "6"):
            self._profiler.start()

    def second(self) -> None:
        with record_function(_SECOND):
            pass

    def stop(self) -> tuple[list[int], list[int]]:
        """Stop; return both parts' allocations and negated releases, in bytes."""
        self._profiler.stop()
        recorded: Any = self._profiler.profiler
        events = recorded.kineto_results.events()
        marks = (event.start_ns() for event in events if event.name() == _SECOND)
        begin = next(marks, float("inf"))
        memory = [event for event in events if event.name() == "[memory]"]
        result = [event for event in memory if event.device_type().name == "CPU"]
        result.sort(key=lambda event: event.start_ns())
        first = [event.nbytes() for event in result if event.start_ns() < begin]
        return first, [event.nbytes() for event in result[len(first) :]]


def loss_memory(loss: Callable[..., Tensor], *results: Tensor) -> LossMemory:
    """Return the memory of a loss on the CPU, with results while the loss needs them.

    Args:
        loss: computes the scalar loss from results of the model.
        results: tensors with the shape and dtype of the model's results, and any values.
    """
    leaves = [result.detach().clone().requires_grad_() for result in results]

    def once() -> tuple[Tensor, Sequence[Tensor | None]]:
        # Clones, so that they are freed once the loss releases them, like a model's results.
        number = loss(*(leaf.clone() for leaf in leaves))
        return number, autograd.grad(number, leaves, allow_unused=True)

    once()
    recording = AllocationRecording()
    try:
        recording.second()
        _value, gradients = once()  # the loss stays live until the recording stops
        del gradients
    finally:
        _, events = recording.stop()
    return LossMemory(max(0, sum(events)), max(accumulate(events), default=0))


def loss_in_step(
    step: Callable[[Any, Any], Tensor], module: nn.Module, batch: object, returned: object
) -> LossMemory | None:
    """Return the memory of the loss in a user's step: all that the step computes after the model.

    The step runs twice, with a model that returns immediately. The memory is unknown if no output
    requires a gradient, one is not on the CPU or in a container unknown to pytree, or the step uses
    other parts of the model.
    """
    leaves, spec = tree_flatten(returned)
    differentiated = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if not differentiated or any(leaf.device.type != "cpu" for leaf in differentiated.values()):
        return None

    def loss(*results: Tensor) -> Tensor:
        inputs = dict(zip(differentiated, results, strict=True))
        now = tree_unflatten([inputs.get(id(leaf), leaf) for leaf in leaves], spec)
        with _returning(module, now):
            return step(module, batch)

    try:
        return loss_memory(loss, *differentiated.values())
    except Exception:  # noqa: BLE001 - a step may fail in any way without its model
        return None


@contextmanager
def _returning(module: nn.Module, result: object) -> Iterator[None]:
    before = vars(module).get("forward")
    vars(module)["forward"] = lambda *_, **__: result
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


_ELEMENTS = 16384


def optimizer_memory(optimizer: Optimizer) -> OptimizerMemory:
    """Return the memory of an optimizer, in FP32 values per parameter element.

    The peak for n equal parameters is modelled as temporary + before (if n > 1) + n * together.
    Raises `ProfileError` if no copy can be made, or its step needs more than parameters.
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
    """Return the memory of an optimizer, zero for none; None if unknown."""
    if optimizer is None:
        return OptimizerMemory()
    try:
        return optimizer_memory(optimizer)
    except ProfileError:
        return None


def _peak(optimizer: Optimizer, count: int) -> tuple[float, float]:
    parameters = [nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(count)]
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
            f"the memory of a step of {type(optimizer).__name__} cannot be measured: {error}",
            do="give it: predictor.memory.OptimizerMemory",
        ) from error
    live = [value for state in like.state.values() for value in state.values()]
    tensors = [value for value in live if isinstance(value, Tensor) and value.numel() == _ELEMENTS]
    state = sum(tensor.nbytes for tensor in tensors) / count
    return state / _ELEMENTS / 4, round(used / _ELEMENTS / 4, 2)
