"""Says so where a training with DUO ends with parameters one look ahead.

Invariant: what it says holds when it is said: a step is outstanding from the call of the optimizer until it is committed, or saved.
"""

from __future__ import annotations

import warnings
import weakref


class Outstanding:
    """The step whose gradients have not been used in full yet.

    Args:
        training: as long as it lives nothing has ended; what ends the process ends it.
        rank: whose it is.

    Attributes:
        step: its number; None where there is none.
    """

    def __init__(self, training: object, rank: int) -> None:
        self.step: int | None = None
        self._rank = rank
        weakref.finalize(training, self._ended)

    def _ended(self) -> None:
        if self.step is not None:
            warnings.warn(
                f"rank {self._rank}: a training with DUO ended before the gradients of step {self.step} were used in full: its "
                "parameters are one look ahead; call handle.flush() before you evaluate, save or end",
                stacklevel=2,
            )
