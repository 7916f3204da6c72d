"""The torch.compile backend: `torch.compile(model, backend="qsync")`.

Invariant: torch finds this function through the entry point group `torch_dynamo_backends`, without
a prior import of qsync_fx. Options are read once, at torch.compile; later changes of a file have no
effect. Errors of qsync_fx reach the user unchanged, not wrapped into torch's BackendCompilerFailed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from qsync_fx.backend.compile import compile_graph
from qsync_fx.backend.dynamo_hooks import install, note, register
from qsync_fx.coverage.compilation_log import forget
from qsync_fx.errors import OptionError, QSyncError, shown
from qsync_fx.options import Options
from qsync_fx.torch_internals import ShortenTraceback


def qsync(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, object] | Options | None = None,
    **others: object,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; `options` are documented in `qsync_fx.options`."""
    try:
        return compile_graph(module, inputs, options_of({"options": options, **others}))
    except Exception as error:
        note(error)
        if isinstance(error, QSyncError):
            raise through_dynamo(error) from error.__cause__
        raise


def options_of(arguments: Mapping[str, Any]) -> Options:
    """Return the options in the arguments that torch.compile passes to a backend."""
    # torch itself rejects a mode together with options.
    if (mode := arguments.get("mode")) == "reduce-overhead":
        return Options.parse({"cudagraphs": True})
    if mode is not None:
        # Other modes make Inductor autotune its own kernels, which are none of qsync_fx.
        raise OptionError(
            f"the backend qsync has no mode {shown(str(mode))}",
            where="torch.compile, mode",
            do="remove it, or use one of: reduce-overhead (options={'cudagraphs': True})",
        )
    # Since 2.15 torch also passes the name of the compilation for logs.
    others = sorted(arguments.keys() - {"options", "name", "mode"})
    if others:
        raise OptionError(
            f"the backend qsync has no argument {', '.join(others)}",
            where="torch.compile",
            do="pass options in options={...}",
        )
    return Options.parse(arguments.get("options"))


def through_dynamo(error: QSyncError) -> QSyncError:
    """Return the same error, also of the class that Dynamo passes through unchanged."""
    kind = type(error)
    methods = {
        "__module__": kind.__module__,
        "__init__": Exception.__init__,
        "__reduce__": lambda raised: error.__reduce__(),
    }
    both = type(kind.__name__, (kind, ShortenTraceback), methods)
    raised: QSyncError = both(error.what, error.where, error.do)
    # Attributes that Dynamo's own `__init__` sets, which depend on the version of torch.
    attributes = vars(ShortenTraceback(first_useful_frame=None))
    raised.__dict__.update(attributes | vars(error))
    raised.__traceback__ = error.__traceback__
    return raised


qsync.reset = forget  # type: ignore[attr-defined]  # torch.compiler.reset calls it
install(qsync, options_of)
register(qsync, "qsync")
