"""A model compiled under one plan after another.

Invariant: Dynamo's limit of versions holds none of them up, and nothing of them is left: code of the model that was compiled meanwhile is
dropped, and the user's own is compiled anew when it is called next. What runs in a model (`applied`) says nothing of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config
from torch import nn
from torch._C._dynamo.eval_frame import reset_code

from qsync_fx.coverage.log import collecting
from qsync_fx.options import Options
from qsync_fx.profiling.measuring.steps import Training

Compiled = Callable[..., Any]
_ANY = 2**16


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[nn.Module, Mapping[str, object], Training], Compiled]]:
    """Yields what compiles a module with some options, by training it for one step."""
    codes: set[CodeType] = set()

    def compile_with(module: nn.Module, options: Mapping[str, object], training: Training) -> Compiled:
        given: dict[str, Any] = dict(options)
        with collecting(Options.parse(options)) as log:
            compiled: Compiled = torch.compile(module, backend="qsync", options=given, dynamic=False)
            training.run(compiled)
            codes.update(code for code, _ in log.frames)
        return compiled

    with torch._dynamo.config.patch(recompile_limit=_ANY, accumulated_recompile_limit=_ANY):
        try:
            yield compile_with
        finally:
            for code in codes:
                reset_code(code)
