"""What becomes of a graph in which a pass of ours broke a rule: a bug of ours must stop nobody's training.

Invariant: the graph computes what the model computes as written, its autocast regions included. Nothing is silent: one warning names
rule and operator and asks for a report, and the reason of every operator that the plan decides on says it. QSYNC_VERIFY=raise makes an
error of it, as our tests do.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qsync_fx import environment
from qsync_fx.errors import PassError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.values import format_of
from qsync_fx.ops import Kind
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.autocast import Autocast
from qsync_fx.passes.base import Pass, Scope
from qsync_fx.passes.classify import Classify
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.tracing.frames import Place

VERIFY = "QSYNC_VERIFY"
_CHOICES = ("fall_back", "raise")
_RUN = (Normalize, Autocast, Classify, Assign)
"""What leaves the numbers of the model as they are, and tells which operators there are."""


@dataclass(frozen=True)
class LeftOut:
    """Stands in the place of a pass that does not run.

    Attributes:
        because: noted for every operator that a plan decides on, directly or through its inputs; "" notes nothing.
    """

    scope: ClassVar[Scope] = Scope.BODY

    name: str
    because: str = ""

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator in graph.own_operators() if self.because else ():
            own = format_of(graph.value(operator.node))
            reason = operator.reason
            if operator.kind is not Kind.FIXED:
                reason = f"{reason}; {self.because}" if reason else self.because
            operator.update(precision=own, output=own, reason=reason)


def wanted() -> bool:
    """Whether graphs fall back.

    Raises:
        OptionError: QSYNC_VERIFY has a value that means nothing.
    """
    return environment.choice(VERIFY, _CHOICES) == "fall_back"


def without_plan(passes: Sequence[Pass], error: PassError) -> tuple[Pass, ...]:
    """Returns what is run in place of `passes`, under their names.

    Where one of the passes itself has failed that prepare a graph, none is run: it stays as Dynamo wrote it, and knows no operators.
    """
    run = [isinstance(step, _RUN) for step in passes]
    if any(step.name == error.step and runs for step, runs in zip(passes, run, strict=True)):
        return tuple(LeftOut(step.name) for step in passes)
    because = f"the graph fell back to the formats that the model holds: {error.what}"
    first = next(at for at in range(len(passes)) if not any(run[at:]))
    return tuple(
        step if run[at] else LeftOut(step.name, because if at == first else "") for at, step in enumerate(passes)
    )


def warn(error: PassError, here: Place) -> None:
    what = error.what[0].upper() + error.what[1:]
    text = (
        f"{what} ({error.where}). That is a bug in qsync_fx. This graph trains in the formats that the model holds, without the plan; the "
        f"rest of the model follows it. Please report it, with the model or with the graph: {VERIFY}=raise makes an error of this warning, "
        "and its attribute `graph` has the text."
    )
    if here.code is not None:
        warnings.warn_explicit(text, UserWarning, here.code.co_filename, here.code.co_firstlineno)
    else:
        warnings.warn(text, UserWarning, stacklevel=2)
