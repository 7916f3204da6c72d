"""Host memory for DUO's copies: gradients, committed parameters and the optimizer's state.

Each bucket leaves the device during the backward pass through a bounded bridge: after a copy within
the device, the fast reduction may overwrite the bucket, while the bridge is copied to pinned host
memory. On a CPU the same copies are plain ones, without streams.

Invariant: the bridge is the only memory on the device that training without DUO does not need.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.duo.functional_optimizer import copied, restored

SLOTS: Final = 2
"""Segments of the bridge: one is filled while the other one is copied to the host."""
SHARE: Final = 32
"""Parameters per value of the bridge, which has 1% of the bytes of training with AdamW."""
MOST: Final = 2**22
"""Most values of a segment: 16 MiB, which PCIe at 25 GB/s copies in 0.7 ms."""


class Offload:
    """Memory of DUO's copies, and transfers between it and the device of the model.

    Without `active`, the copies are on the device itself and the optimizer uses them directly.

    Args:
        device: device of the model.
        size: number of trained parameters, which bounds the bridge.
        active: whether copies are in host memory.
    """

    def __init__(self, device: torch.device, size: int, active: bool) -> None:
        self.active = active
        self.host = CPU if active else device
        self._device, self._has_streams = device, active and device.type == "cuda"
        self._segment = max(1, min(size // (SHARE * SLOTS), MOST))
        self._bridge: deque[tuple[Tensor, Any]] = deque()  # segments, and when they are free
        self._state: dict[Any, Any] = {}  # saved state of the optimizer
        self._gradients: dict[int, Tensor] = {}  # fast gradients during a commit, by parameter
        self._recovered: Any = None  # event: the state of the commit is on the device
        # One stream fills the bridge, one empties it, and one recovers the optimizer's state.
        self._fill, self._drain, self._recover = self._streams(3)

    @property
    def bridge_nbytes(self) -> int:
        """Number of bytes of the bridge on the device."""
        return sum(segment.nbytes for segment, _ in self._bridge)

    def empty_like(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialized memory for a copy, with the layout of dense `values`."""
        settings: dict[str, Any] = {"dtype": dtype, "device": self.host}
        return torch.empty_like(values, **settings, pin_memory=self._has_streams)

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Copy values to or from the host in the order of the current stream; return `target`."""
        return target.copy_(source, non_blocking=self._has_streams)

    def offload(self, values: Tensor, target: Tensor) -> Any:
        """Copy a bucket to the host in FP32; return the event after which it may be overwritten.

        Args:
            values: 1-D, on the device.
            target: 1-D, FP32, from `empty_like`; complete after `wait_offloaded`.

        Returns:
            An event for `wait`; None if the copy is complete.
        """
        if not self.active:
            target.copy_(values)
            return None
        if not self._bridge:
            for _ in range(SLOTS):
                segment = torch.empty(self._segment, dtype=torch.float32, device=self._device)
                self._bridge.append((segment, None))
        self._order(self._fill, self._current())
        parts = [torch.split(part, self._segment) for part in (values, target)]
        for source, result in zip(*parts, strict=True):
            memory, is_free = self._bridge.popleft()
            bridge = memory[: source.numel()]
            with self._on(self._fill):
                self.wait(is_free)
                bridge.copy_(source)
            self._order(self._drain, self._fill)
            with self._on(self._drain):
                self.copy(bridge, result)
            self._bridge.append((memory, self._mark(self._drain)))
        return self._mark(self._fill)

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event; None is complete."""
        if event is not None:
            self._current().wait_event(event)

    def wait_offloaded(self) -> None:
        """Block until all offloaded buckets are in host memory."""
        if self._has_streams:
            self._drain.synchronize()

    def synchronize(self) -> None:
        """Block until host memory has the result of all copies queued so far."""
        self.wait_recovered()
        self.wait_offloaded()
        if self._has_streams:
            self._current().synchronize()

    def save_state(self, state: MutableMapping[Any, Any]) -> None:
        """Copy the optimizer's state; `recover_state` writes it back."""
        self._state = restored(self._state, state, self._allocated, self._has_streams)

    def recover_state(self, state: MutableMapping[Any, Any]) -> None:
        """Write the saved state back, concurrently with the computation of the next step."""
        self._order(self._recover, self._current())
        with self._on(self._recover):
            restored(state, self._state, self._uploaded, self._has_streams)
        self._recovered = self._mark(self._recover)
        if not self.active:
            self._state = {}
        if self._has_streams:
            for values in state.values():
                for value in values.values():
                    if isinstance(value, Tensor) and value.device.type == "cuda":
                        value.record_stream(self._recover)

    def wait_recovered(self) -> None:
        """Let the current stream wait for the recovered state; call it before the state is used."""
        self.wait(self._recovered)
        self._recovered = None

    @contextlib.contextmanager
    def gradients_replaced(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
    ) -> Iterator[None]:
        """Set other gradients of the parameters within the block.

        In host memory, they use the memory of the present gradients, which wait on the host.
        """
        present, moved = [p.grad for p in parameters], dict[int, Tensor]()
        for place, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            values, p.grad = p.grad, None
            if gradient is None:
                continue
            if values is None or not self.active:
                p.grad = gradient.to(p.device, p.dtype)
                continue
            moved[place] = values.detach()
            if place not in self._gradients:
                self._gradients[place] = self.empty_like(moved[place])
            self.copy(moved[place], self._gradients[place])
            p.grad = self.copy(gradient, values.detach())
        try:
            yield
        finally:
            for place, values in moved.items():
                self.copy(self._gradients[place], values)
            for p, values in zip(parameters, present, strict=True):
                p.grad = values

    def _allocated(self, value: Any) -> Any:
        """Return a copy of a value of the optimizer's state; tensors on the CPU stay there."""
        if not isinstance(value, Tensor) or value.device != self._device:
            return copied(value)
        return self.copy(value.detach(), self.empty_like(value.detach()))

    def _uploaded(self, value: Any) -> Any:
        """Return a saved value for an optimizer that has dropped its own tensor."""
        if self._has_streams and isinstance(value, Tensor) and value.is_pinned():
            return value.to(self._device)
        return copied(value)

    def _streams(self, count: int) -> list[Any]:
        make: Any = torch.cuda.Stream
        return [make(self._device) if self._has_streams else None for _ in range(count)]

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._has_streams else None

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self._has_streams else contextlib.nullcontext()

    def _order(self, later: Any, earlier: Any) -> None:
        if self._has_streams:
            later.wait_stream(earlier)

    def _mark(self, stream: Any) -> Any:
        return stream.record_event() if self._has_streams else None
