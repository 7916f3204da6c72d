"""Captured models, whose graphs any runner can execute: as written, observed, or lowered.

Dynamo and the passes see the model once, in FP32; then calls run its graphs with any runner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from qsync_fx.coverage.compilation_log import collecting
from qsync_fx.diagnostics.explain_model import explained, observed
from qsync_fx.diagnostics.explanation import Explained
from qsync_fx.errors import ProfileError
from qsync_fx.graph.graph import Operator
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.plan.plan import Plan
from qsync_fx.torch_internals import dynamo_config

_NORMS: Final = (torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default)
"""Normalizations whose CUDA kernels require parameters of the input's dtype."""


def called(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None = None
) -> Any:
    """Return an operator's result; a norm with wider parameters is rounded only once."""
    x = next(iter(args), None)
    if target in _NORMS and isinstance(x, Tensor) and (device or x.device.type) == "cuda":
        others = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, Tensor)]
        if any(v.is_floating_point() and v.itemsize > x.itemsize for v in others):
            return target(x.float(), *args[1:], **kwargs).to(x.dtype)
    return target(*args, **kwargs)


_USED_OPTIONS: Final = (
    "rounding gradient_rounding scaling emulate_unsupported passes root target".split()
)

Run = Callable[[Explained, Sequence[Any]], Any]


def as_it_is(part: Explained, inputs: Sequence[Any]) -> Any:
    return part.graph.module(*inputs)


class Captured:
    """A model, called by `call`, and the graphs that Dynamo and the passes captured so far."""

    def __init__(self, model: nn.Module, options: Options | None = None) -> None:
        used = {name: getattr(options or Options(), name) for name in _USED_OPTIONS}
        self.options = Options(plan=Plan.uniform("fp32"), **used)
        self.model = model
        self.graphs: list[Explained] = []
        self._run: Run = as_it_is
        with collecting(self.options):
            self.call: Any = observed(model, self._backend, self.options, dynamic=False)

    @property
    def operators(self) -> list[Operator]:
        """Operators that a plan decides on, without duplicates, in execution order."""
        result: dict[str, Operator] = {}
        for part in self.graphs:
            for operator in part.operators:
                if operator.kind is Kind.ADJUSTABLE and operator.row is not None:
                    result.setdefault(str(operator.id), operator)
        return list(result.values())

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        before, self._run = self._run, run
        try:
            # Each captured model compiles equal code again, so the recompile limits are lifted.
            limits = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
            with dynamo_config.patch(limits), collecting(self.options):
                yield
        finally:
            self._run = before

    def require(self) -> None:
        if not self.graphs:
            raise ProfileError(
                "Dynamo compiled no part of the model, so its operators are not known",
                where=type(self.model).__name__,
                do="let step(model, batch) call its argument; qsync inspect shows graph breaks",
            )

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        part = explained(module, inputs, self.options, self.graphs)
        self.graphs.append(part)
        return lambda *value: self._run(part, value)
