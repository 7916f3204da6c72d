"""A graph that the inner compiler passes over: Inductor does so with BF16 on GPUs before Ampere.

Invariant: Dynamo would run the frame as it was written, without the plan and without a word. Where something was planned that is an error;
else it is what torch.compile does, and is said once for each place in the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from torch._dynamo.exc import BackendCompilerFailed, SkipFrame

from qsync_fx.errors import DeviceError
from qsync_fx.graph import PrecisionGraph


@contextlib.contextmanager
def told(graph: PrecisionGraph) -> Iterator[None]:
    """Compiles `graph` within; raises `DeviceError` where it is passed over and was planned."""
    try:
        yield
    except (SkipFrame, BackendCompilerFailed) as error:
        # Where its cache is passed by, Inductor takes the request to skip a frame for an error of its own (torch 2.13).
        asked = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if not isinstance(asked, SkipFrame):
            raise
        context = graph.context
        what = f"{context.options.inner} does not compile this graph for {context.device}: {asked}"
        if not context.automatic:
            raise DeviceError(
                f"{what}; it would run as the model is written, without the plan",
                where=graph.where,
                do="hold the model and its inputs in FP32 or FP16 there, and let the plan choose what is narrower",
            ) from error
        warnings.warn(f"{what}; it runs uncompiled ({graph.where})", UserWarning, stacklevel=2)
        raise asked from None
