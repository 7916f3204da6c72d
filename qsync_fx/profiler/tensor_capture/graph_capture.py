"""A model whose graphs are run by whoever looks at them: as written, with an eye on each operator, or as lowered under a plan.

Dynamo and the passes see the model once, with everything in FP32. After that the same call of the model runs whatever `running` names, op
by op and with autograd above it, so that nothing is compiled again: not for another plan, and not for another way to look.

Invariant: ids are those of plans, since the graphs are those of the backend. What no graph holds runs as the model wrote it.

Operators called one by one, with operands that the compiler would convert as it fuses them.

Invariant: a result has the type of the activation, and the bits of FP32 arithmetic rounded once, on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch._dynamo
from torch import Tensor, fx, nn

from qsync_fx.coverage.compilation_log import collecting
from qsync_fx.diagnostics.explain_model import explained, observed
from qsync_fx.diagnostics.explanation import Explained
from qsync_fx.errors import ProfileError
from qsync_fx.graph.graph import Operator
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.plan.plan import Plan

_NORMS: Final = (torch.ops.aten.layer_norm.default, torch.ops.aten.group_norm.default)
"""Of which torch's kernels for CUDA take parameters of their input's type alone."""


def called(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None = None
) -> Any:
    """Returns what an operator returns; `device` is the type of the one that it is called for, by default where its operands lie."""
    x = args[0] if args else None
    if target in _NORMS and isinstance(x, Tensor) and (device or x.device.type) == "cuda":
        others = [
            v.dtype
            for v in (*args[1:], *kwargs.values())
            if isinstance(v, Tensor) and v.is_floating_point()
        ]
        if any(dtype.itemsize > x.dtype.itemsize for dtype in others):
            return target(x.float(), *args[1:], **kwargs).to(x.dtype)
    return target(*args, **kwargs)


Run = Callable[[Explained, Sequence[Any]], Any]
"""Computes what a graph computes, of its inputs."""


def as_it_is(part: Explained, inputs: Sequence[Any]) -> Any:
    """Runs a graph in FP32."""
    return part.graph.module(*inputs)


class Captured:
    """
    Args:
        model: a module.
        options: of the backend; the plan is FP32 whatever they say.

    Attributes:
        graphs: those that have been made so far.
        call: calls the model.
    """

    def __init__(self, model: nn.Module, options: Options | None = None) -> None:
        inputs = options or Options()
        self.options = Options(
            plan=Plan.uniform("fp32"),
            rounding=inputs.rounding,
            gradient_rounding=inputs.gradient_rounding,
            scaling=inputs.scaling,
            emulate_unsupported=inputs.emulate_unsupported,
            passes=inputs.passes,
            root=inputs.root,
            target=inputs.target,
        )
        self.model = model
        self.graphs: list[Explained] = []
        self._run: Run = as_it_is
        with collecting(self.options):
            self.call: Any = observed(model, self._backend, self.options, dynamic=False)

    @property
    def operators(self) -> list[Operator]:
        """The operators that a plan decides on, each once, in the order in which they run."""
        result: dict[str, Operator] = {}
        for part in self.graphs:
            for operator in part.operators:
                if operator.kind is Kind.ADJUSTABLE and operator.row is not None:
                    result.setdefault(str(operator.id), operator)
        return list(result.values())

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Lets the model's graphs be run by `run`."""
        before, self._run = self._run, run
        try:
            # Equal code is compiled again for each captured model, however often it was before.
            with (
                torch._dynamo.config.patch(
                    recompile_limit=2**16, accumulated_recompile_limit=2**16
                ),
                collecting(self.options),
            ):
                yield
        finally:
            self._run = before

    def require(self) -> None:
        """Raises `ProfileError` where the model has run and no graph was made."""
        if not self.graphs:
            raise ProfileError(
                "Dynamo compiled no part of the model, so that nothing is known of its operators",
                where=type(self.model).__name__,
                do="call the model in step(model, batch) through its first argument, and see qsync inspect for graph breaks",
            )

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        part = explained(module, inputs, self.options, self.graphs)
        self.graphs.append(part)
        return lambda *value: self._run(part, value)
