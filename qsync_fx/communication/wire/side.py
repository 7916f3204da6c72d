"""Work on gradients that lie on a GPU, on a stream of its own beside those that compute.

Invariant: work begins when what the thread that gave it had queued before is done, and what it has queued is done when it ends: whoever is
told that it has ended need not wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Side:
    """A stream of a device; on the CPU, where everything is done as it is called, nothing."""

    def __init__(self, device: torch.device) -> None:
        self.devices: list[int | str | torch.device] = [device] if device.type == "cuda" else []
        stream: Any = torch.cuda.Stream
        self._stream: Any = stream(device) if self.devices else None

    def mark(self) -> Any:
        """Returns what has been queued until now, by the thread that calls it."""
        return torch.cuda.current_stream(self.devices[0]).record_event() if self.devices else None

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Has what is called within be queued behind a mark, and waits for all of it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.devices[0]), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
