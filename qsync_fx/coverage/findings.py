"""Parts of a plan that do not apply to a model, over all graphs compiled so far, and the causes.

Findings are data. A plan's default counts only for modules given to torch.compile; entries of the
plan count everywhere. A module that runs as written in its planned format conforms to the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch import nn

from qsync_fx.coverage.compilation_log import Frame, Outcome, Tree, has_gradients, has_run, stale
from qsync_fx.formats import Precision
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.module_paths import joined, own_parameters
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId, escaped, module_regex
from qsync_fx.plan.plan import misfit


class Reason(Enum):
    """Kind of a cause: its text in reports, and advice."""

    RNN = (
        "Dynamo does not compile a function that calls an RNN",
        "call the RNN in a separate method with @torch.compiler.disable, so that the other layers "
        "are compiled; torch._dynamo.config.allow_rnn = True unrolls it over time, for short "
        "sequences of one length",
    )
    SPARSE = (
        "Dynamo does not compile a function with a sparse tensor as argument",
        "store the sparse tensor as an attribute and multiply by it in a separate method with "
        "@torch.compiler.disable, so that the other layers are compiled",
    )
    MODE = (
        "it is called under a TorchDispatchMode, where Dynamo does not compile",
        "call the model outside of the mode, or let ignore_compile_internals() of the mode's class "
        "return True",
    )
    DISABLED = (
        "torch.compiler.disable applies to it",
        "remove torch.compiler.disable, or compile its submodules separately",
    )
    BACKWARD_HOOK = (
        "it has a full backward hook, which Dynamo traces only under compiled autograd",
        "set torch._dynamo.config.compiled_autograd = True, or use hooks on tensors",
    )
    LIMIT = (
        "Dynamo's recompile limit is reached, so further versions run as written",
        "increase torch._dynamo.config.recompile_limit; TORCH_LOGS=recompiles shows the causes",
    )
    NESTED = (
        "nn.TransformerEncoder packs padded inputs into nested tensors without gradients, and "
        "Dynamo does not compile its layers",
        "create it with enable_nested_tensor=False, or with mask_check=True, its default",
    )
    INBUILT = (
        "its class is one of torch's own, which Dynamo compiles only if traced code calls them",
        "compile the module itself before it is wrapped, or call it in a forward of your own",
    )
    BREAK = ("the graph breaks at its call", "")
    SKIPPED = ("Dynamo did not compile the function that calls it", "")
    NOT_GIVEN = ("torch.compile was not given it", "compile the whole model, or this module too")
    NOT_MET = (
        "Dynamo has processed no call of the model",
        "call the result of torch.compile, not the original module, and see that neither "
        'torch.compiler.set_stance("force_eager") nor TORCHDYNAMO_DISABLE is set',
    )
    ELSEWHERE = (
        "it ran, but not where compiled code calls it",
        "call it in the forward pass that is compiled, or compile it separately",
    )
    NOT_CALLED = ("no call of it has been compiled", "")

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_MESSAGES = {
    "Attempted to wrap RNN": Reason.RNN,
    "Attempted to wrap sparse Tensor": Reason.SPARSE,
    "torch dispatch mode": Reason.MODE,
    "torch.compiler.disable": Reason.DISABLED,
    "backwards hooks": Reason.BACKWARD_HOOK,
    "recompile limit": Reason.LIMIT,
    "recompile_limit": Reason.LIMIT,
    "_nested_tensor_from_mask": Reason.NESTED,
}
"""Parts of Dynamo's messages that identify a kind."""

_USELESS_HINTS = re.compile(
    "eport an issue|report a bug|It may be possible|an earlier graph break|finding a workaround"
    # With fullgraph=True the call would have raised; the reported step ran without an error.
    "|fullgraph|may result in an error when running in eager"
)


@dataclass(frozen=True)
class CoverageCause:
    """Cause for which a module is in no compiled graph.

    Attributes:
        function, where: function that Dynamo left to Python, fully or in part, and its source line;
            "" if none.
        text: Dynamo's message with reason and hints.
        part: path of the module that `why` refers to: the module itself or an ancestor.
    """

    why: Reason
    function: str = ""
    where: str = ""
    text: str = ""
    part: str = ""

    @property
    def reason(self) -> str:
        """Text for reports, with Dynamo's message for general kinds."""
        result = self.why.value[0]
        if self.text and self.why in (Reason.BREAK, Reason.SKIPPED):
            first_line = self.text.strip().partition("\n")[0]
            result += f": {first_line.rstrip('.')}"
        return f"{result} ({self.function}, {self.where})" if self.where else result

    @property
    def advice(self) -> str:
        """Advice for the kind, or else Dynamo's useful hints."""
        if self.why.value[1]:
            return self.why.value[1]
        lines = [line.strip().rstrip(".") for line in self.text.splitlines()]
        hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
        if useful := [hint for hint in hints if not _USELESS_HINTS.search(hint)]:
            return "; ".join(useful)
        return "TORCH_LOGS=graph_breaks shows where" if self.where else ""


def kind_of(message: str) -> Reason | None:
    """Return the kind of a Dynamo message; None if only the message itself describes it."""
    return next((why for part, why in _MESSAGES.items() if part in message), None)


def nested(frame: Frame) -> CoverageCause | None:
    """Return the cause for a function that packs inputs into nested tensors; None for others."""
    for text in frame.texts:
        if kind_of(text) is Reason.NESTED:
            return CoverageCause(Reason.NESTED, frame.name, frame.where, text)
    return None


def cause_of(tree: Tree, path: str) -> CoverageCause:
    """Return why a module is in no graph, or only in a graph that no longer runs."""
    if not tree.concerns(path):
        return CoverageCause(Reason.NOT_GIVEN)
    if not tree.ran:
        return CoverageCause(Reason.NOT_MET)
    inbuilt: CoverageCause | None = None
    for part in tree.above(path):
        frames = [f for f in tree.frames.get(part, ()) if path not in tree.covered or stale(f)]
        causes = [cause for frame in frames for cause in _causes(tree, frame, part, path)]
        if not causes:
            continue
        result = max(causes, key=lambda cause: _certainty(tree, cause, path))
        # A class of torch's own is the cause only if no ancestor is, except for nested tensors.
        if result.why is Reason.NESTED or (result.why is not Reason.INBUILT and inbuilt is None):
            return result
        inbuilt = inbuilt or result
    if inbuilt is not None:
        return inbuilt
    if has_run(tree.modules[path], tree.log):
        return CoverageCause(Reason.ELSEWHERE)
    return CoverageCause(Reason.NOT_CALLED)


def _causes(tree: Tree, frame: Frame, part: str, path: str) -> Iterator[CoverageCause]:
    """Yield the causes for which Dynamo left a function to Python, fully or in part."""
    if frame.outcome is Outcome.COMPILED:
        return
    skipped = frame.outcome is Outcome.SKIPPED
    general = Reason.SKIPPED if skipped else Reason.BREAK
    inbuilt = type(tree.modules[part]).__module__.startswith(("torch.nn.", "torch.ao."))
    for text in frame.texts or ("",):
        why = kind_of(text)
        if why is not None or not (skipped and inbuilt):
            yield CoverageCause(why or general, frame.name, frame.where, text, part)
        elif part != path or part in tree.compiled:
            # For a single layer the caller is the cause, and it explains more.
            yield CoverageCause(Reason.INBUILT, part=part)


def _certainty(tree: Tree, cause: CoverageCause, path: str) -> tuple[bool, bool, bool]:
    """Return how certainly a cause is about a module; a function can break in several places."""
    parts = list(tree.above(path))
    if cause.why is Reason.BACKWARD_HOOK:
        named = any(tree.modules[part]._backward_hooks for part in parts)
    else:
        # Dynamo names the called function, or the attribute of the module's owner.
        below = [part for part in parts if part != cause.part]
        names = [f"{type(tree.modules[part]).__name__}.forward" for part in below]
        names += [f"['{part.rpartition('.')[2]}']" for part in below]
        named = any(name in cause.text for name in names)
    return named, cause.why is not Reason.BREAK, cause.why not in (Reason.SKIPPED, Reason.DISABLED)


@dataclass(frozen=True)
class Uncovered:
    """Module with parameters that is in no compiled graph, or only in graphs that no longer run.

    Attributes:
        ran: whether it has run, as far as known.
        precision: format that it computes in as written; None if no plan decides on it.
        likely: operator that it would be in a graph, derived from its class name.
        lost: whether it runs differently than planned.
    """

    path: str
    type: str
    cause: CoverageCause
    ran: bool
    precision: Precision | None
    likely: OpId
    planned: Precision | None = None
    lost: bool = False

    def under(self, plan: Plan) -> Uncovered:
        """Return the same module under another plan."""
        choice = plan.precision_for(self.likely)
        if choice is None:
            return replace(self, planned=None, lost=False)
        counts = self.ran and (choice.explicit or self.cause.why is not Reason.NOT_GIVEN)
        lost = counts and not self.conforms_to(choice.precision)
        return replace(self, planned=choice.precision, lost=lost)

    def conforms_to(self, planned: Precision) -> bool:
        """Return whether the uncompiled module computes in the planned format."""
        return self.precision is None or self.precision is planned


@dataclass(frozen=True)
class Unused:
    """Entry of the plan that matches no operator, but perhaps the uncovered modules `inside`."""

    entry: OpId | str
    precision: Precision
    near: tuple[str, ...]
    inside: tuple[Uncovered, ...]


@dataclass(frozen=True)
class Findings:
    """Differences between a plan and its application to a model.

    Attributes:
        as_written: entries that match no operator, but describe modules in no graph correctly.
    """

    uncovered: tuple[Uncovered, ...]
    unused: tuple[Unused, ...]
    as_written: tuple[OpId | str, ...] = ()

    @property
    def lost(self) -> list[Uncovered]:
        """Modules that run differently than planned."""
        return [module for module in self.uncovered if module.lost]

    def __bool__(self) -> bool:
        return bool(self.lost or self.unused)


def findings(plan: Plan, decided: Iterable[OpId], modules: Sequence[Uncovered]) -> Findings:
    """Return the differences between a plan and its application.

    `decided` are the adjustable operators in compiled graphs, `modules` those in no graph.
    """
    modules = tuple(module.under(plan) for module in modules)
    unused, as_written = [], []
    for entry, precision, near in misfit(plan, list(decided)).unused:
        inside = tuple(module for module in modules if _names(entry, module.likely.module))
        if inside and all(module.conforms_to(precision) for module in inside):
            as_written.append(entry)
        else:
            unused.append(Unused(entry, precision, near, inside))
    return Findings(modules, tuple(unused), tuple(as_written))


def _names(entry: OpId | str, path: str) -> bool:
    if isinstance(entry, OpId):
        return path == (entry.module or entry.after)
    return module_regex(entry).match(escaped(path)) is not None


def findings_of(tree: Tree) -> Findings:
    """Return the differences between the plan of a model and its application."""
    return findings(tree.intended, tree.decided(), uncovered(tree))


def uncovered(tree: Tree) -> tuple[Uncovered, ...]:
    """Return the modules of a model in no compiled graph, or only in graphs that no longer run."""
    return tuple(_uncovered(tree, path, cause_of(tree, path)) for path in _missing(tree))


def in_doubt(tree: Tree) -> list[nn.Module]:
    """Return uncovered modules with gradients that may not have run on this rank."""
    return [
        tree.modules[path]
        for path in _missing(tree)
        if has_gradients(tree.modules[path]) and cause_of(tree, path).why is Reason.NOT_CALLED
    ]


def packed(tree: Tree, frames: Sequence[Frame]) -> Findings:
    """Return findings for layers that run uncompiled because a function packs nested tensors."""
    causes = {frame.module(): cause for frame in frames if (cause := nested(frame)) is not None}
    result = [
        _uncovered(tree, inner, cause)
        for path, part in tree.modules.items()
        if (cause := causes.get(part)) is not None
        for inner in tree.parameterised
        if inner.startswith(joined(path, "layers."))
    ]
    return findings(tree.intended, tree.decided(), result)


def _missing(tree: Tree) -> Iterator[str]:
    for path in tree.parameterised:
        frames = (frame for part in tree.above(path) for frame in tree.frames.get(part, ()))
        if path not in tree.covered or any(map(stale, frames)):
            yield path


def _uncovered(tree: Tree, path: str, cause: CoverageCause) -> Uncovered:
    module = tree.modules[path]
    kind, parameters = type(module).__name__, own_parameters(module)
    # Linear, LayerNorm, Conv2d: linear, layer_norm, conv2d.
    operator = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    owned = None if isinstance(module, nn.RNNBase) else format_of(list(parameters))
    # Gradients show whether a module has run, if the model has any.
    trained = any(p.grad is not None for p in tree.root.parameters())
    learns = trained and any(p.requires_grad for p in parameters)
    ran = cause.why is not Reason.NOT_CALLED
    if ran and (learns or cause.why is Reason.NOT_MET):
        ran = has_gradients(module)
    return Uncovered(path, kind, cause, ran, owned, OpId(joined(tree.within, path), operator))
