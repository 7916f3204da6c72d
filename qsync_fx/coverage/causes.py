"""Causes for which a module is in no compiled graph, with advice, and Dynamo's recompile limit.

A cause is data: a kind, the function that Dynamo left to Python, and Dynamo's message. One table
contains the explanations and the advice. An unknown message of Dynamo has a general kind and is
passed on. `tell_of_a_limit` reports functions that exceed Dynamo's recompile limit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import CodeType

from torch import nn

from qsync_fx.coverage.compilation_log import Frame, Outcome, logs
from qsync_fx.coverage.module_coverage import Tree, has_run, stale
from qsync_fx.errors import PlanError
from qsync_fx.ops.spec import Kind
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import OpId


class Reason(StrEnum):
    RNN = "rnn"
    SPARSE = "sparse"
    MODE = "mode"
    DISABLED = "disabled"
    BACKWARD_HOOK = "backward hook"
    LIMIT = "limit"
    NESTED = "nested"
    INBUILT = "inbuilt"
    BREAK = "break"
    SKIPPED = "skipped"
    NOT_GIVEN = "not given"
    NOT_MET = "not met"
    ELSEWHERE = "elsewhere"
    NOT_CALLED = "not called"


@dataclass(frozen=True)
class CoverageCause:
    """Cause for which a module is in no compiled graph.

    Attributes:
        why: kind of the cause.
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


_WORDS = (
    ("Attempted to wrap RNN", Reason.RNN),
    ("Attempted to wrap sparse Tensor", Reason.SPARSE),
    ("torch dispatch mode", Reason.MODE),
    ("torch.compiler.disable", Reason.DISABLED),
    ("backwards hooks", Reason.BACKWARD_HOOK),
    ("recompile limit", Reason.LIMIT),
    ("recompile_limit", Reason.LIMIT),
    ("_nested_tensor_from_mask", Reason.NESTED),
)
"""Parts of Dynamo's messages that identify a kind."""

_SAID = {
    Reason.RNN: (
        "Dynamo leaves a function that calls an RNN to Python",
        "call the RNN in a method of its own, under @torch.compiler.disable, so that what is around it is compiled; "
        "torch._dynamo.config.allow_rnn = True unrolls it over time, which is for short sequences of one length",
    ),
    Reason.SPARSE: (
        "Dynamo leaves a function that is given a sparse tensor to Python",
        "hold the sparse tensor as an attribute and multiply by it in a method of its own, under @torch.compiler.disable, "
        "so that the layers around it are compiled",
    ),
    Reason.MODE: (
        "a TorchDispatchMode is active where it is called, and Dynamo compiles nothing under one",
        "call the model outside of the mode; a mode whose class has ignore_compile_internals() return True is let through",
    ),
    Reason.DISABLED: (
        "torch.compiler.disable stands around it",
        "remove torch.compiler.disable, or torch.compile what is inside by itself",
    ),
    Reason.BACKWARD_HOOK: (
        "it has a full backward hook, which Dynamo traces under compiled autograd alone",
        "set torch._dynamo.config.compiled_autograd = True, or hook the tensors in place of the module",
    ),
    Reason.LIMIT: (
        "Dynamo's limit of versions of a function is reached, so that others run as written",
        "set torch._dynamo.config.recompile_limit higher; TORCH_LOGS=recompiles tells why each version was made",
    ),
    Reason.NESTED: (
        "nn.TransformerEncoder packs padded inputs into nested tensors without gradients, and Dynamo leaves its layers to Python",
        "make it with enable_nested_tensor=False, or with mask_check=True, its default",
    ),
    Reason.INBUILT: (
        "its class is one of torch's own, which Dynamo compiles only where code that it traces calls them",
        "compile the module itself before anything is wrapped around it, or call it in a forward of your own",
    ),
    Reason.BREAK: ("the graph breaks where it is called", ""),
    Reason.SKIPPED: ("Dynamo left the function that calls it to Python", ""),
    Reason.NOT_GIVEN: (
        "torch.compile was not given it",
        "compile the whole model, or this module too",
    ),
    Reason.NOT_MET: (
        "Dynamo has met nothing of the model",
        "call what torch.compile returned, not the module that it was given, and see that neither "
        'torch.compiler.set_stance("force_eager") nor TORCHDYNAMO_DISABLE is set',
    ),
    Reason.ELSEWHERE: (
        "it ran, but not where compiled code calls it",
        "call it in the forward pass that is compiled, or torch.compile it by itself",
    ),
    Reason.NOT_CALLED: ("no call of it has been compiled", ""),
}
_NO_ADVICE = (
    *(
        "eport an issue",
        "report a bug",
        "It may be possible",
        "an earlier graph break",
        "finding a workaround",
    ),
    # With fullgraph=True the call would have raised; the reported step ran without an error.
    *("fullgraph", "may result in an error when running in eager"),
)
_ELSE = "TORCH_LOGS=graph_breaks shows where"


def why_of(text: str) -> Reason | None:
    """Return the kind of a Dynamo message; None if only the message itself describes it."""
    return next((why for words, why in _WORDS if words in text), None)


def reason(cause: CoverageCause) -> str:
    """Return the reason of a cause, with Dynamo's message for general kinds."""
    reported = _SAID[cause.why][0]
    text = (
        f": {_first_line(cause.text)}"
        if cause.text and cause.why in (Reason.BREAK, Reason.SKIPPED)
        else ""
    )
    return f"{reported}{text}" + (f" ({cause.function}, {cause.where})" if cause.where else "")


def way_out(cause: CoverageCause) -> str:
    """Return the advice for a cause."""
    return _SAID[cause.why][1] or "; ".join(_hints(cause.text)) or (_ELSE if cause.where else "")


def cause_of(tree: Tree, path: str) -> CoverageCause:
    """Return why a module is in no graph, or only in a graph that no longer runs."""
    if not tree.concerns(path):
        return CoverageCause(Reason.NOT_GIVEN)
    if not tree.ran:
        return CoverageCause(Reason.NOT_MET)
    inbuilt: CoverageCause | None = None
    for part in tree.above(path):
        frames = [frame for frame in tree.frames(part) if path not in tree.held or stale(frame)]
        if causes := [cause for frame in frames for cause in _causes(tree, frame, part, path)]:
            result = max(causes, key=lambda cause: _about(tree, cause, path))
            if result.why is Reason.NESTED or (
                result.why is not Reason.INBUILT and inbuilt is None
            ):
                return result
            inbuilt = inbuilt or result
    if inbuilt is not None:
        return inbuilt
    return CoverageCause(
        Reason.ELSEWHERE if has_run(tree.modules[path], tree.log) else Reason.NOT_CALLED
    )


def nested(frame: Frame) -> CoverageCause | None:
    """Return the cause for a function that packs inputs into nested tensors; None for others."""
    text = next((text for text in frame.texts if why_of(text) is Reason.NESTED), None)
    return None if text is None else CoverageCause(Reason.NESTED, frame.name, frame.where, text)


def _causes(tree: Tree, frame: Frame, part: str, path: str) -> Iterator[CoverageCause]:
    """Yield the causes for which Dynamo left a function to Python, fully or in part."""
    skipped = frame.outcome is Outcome.SKIPPED
    for text in frame.texts or ("",) if skipped or frame.outcome is Outcome.BROKE else ():
        why = why_of(text)
        if why is not None:
            yield CoverageCause(why, frame.name, frame.where, text, part=part)
        elif skipped and type(tree.modules[part]).__module__.startswith(("torch.nn.", "torch.ao.")):
            # For a single layer the caller is the cause, and it explains more.
            if part != path or part in tree.compiled:
                yield CoverageCause(Reason.INBUILT, part=part)
        else:
            yield CoverageCause(
                Reason.SKIPPED if skipped else Reason.BREAK, frame.name, frame.where, text, part
            )


def _about(tree: Tree, cause: CoverageCause, path: str) -> tuple[bool, bool, bool]:
    """Return a sort key: how certainly a cause is about a module.

    A function can break in several places, and Dynamo compiles its other parts.
    """
    if cause.why is Reason.BACKWARD_HOOK:
        named = any(tree.modules[part]._backward_hooks for part in tree.above(path))
    else:
        names = [
            name
            for part in tree.above(path)
            if part != cause.part
            for name in _names(tree.modules[part], part)
        ]
        named = any(name in cause.text for name in names)
    return named, cause.why is not Reason.BREAK, cause.why not in (Reason.SKIPPED, Reason.DISABLED)


def _names(module: nn.Module, path: str) -> tuple[str, ...]:
    """Return Dynamo's possible names of a module: the called function or its owner's attribute."""
    return f"{type(module).__name__}.forward", f"['{path.rpartition('.')[2]}']"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")


def _hints(text: str) -> tuple[str, ...]:
    """Return Dynamo's hints, except those that do not help users."""
    lines = (line.strip() for line in text.splitlines())
    hints = (line.removeprefix("Hint: ").rstrip(".") for line in lines if line.startswith("Hint: "))
    return tuple(hint for hint in hints if not any(words in hint for words in _NO_ADVICE))


_LIMITS = ("accumulated_recompile_limit", "recompile_limit")


def tell_of_a_limit(
    code: CodeType, options: Options, texts: Iterable[str], frames: Sequence[Frame] = ()
) -> None:
    """Report that Dynamo leaves a function to Python because of its recompile limit.

    With non-default options it raises, because the function would run without the plan.
    Otherwise it warns, as uncompiled execution is the behavior of torch.compile. The limit must be
    among `texts`, and the plan must decide on operators of earlier versions.

    Args:
        code: code of the function.
        options: options of the compilation.
        texts: Dynamo's messages.
        frames: entries of the function for the modules that it is called for; they name the module
            of functions that torch wraps around it.

    Raises:
        PlanError: options are given, and the plan decides on operators of the function.
    """
    reported = next((text for text in texts if why_of(text) is Reason.LIMIT), None)
    if reported is None or not _decides_on_any(options, _held(code)):
        return
    name = (
        f"torch._dynamo.config.{next((name for name in _LIMITS if name in reported), _LIMITS[-1])}"
    )
    function, where = next(
        map(_described, frames), (code.co_qualname, f"{code.co_filename}:{code.co_firstlineno}")
    )
    message = f"Dynamo has reached {name} for {function} and makes no more versions of it"
    do = f"set {name} higher if so many versions are meant; TORCH_LOGS=recompiles tells why each was made"
    if options.is_default:
        text = f"{message}: another one runs uncompiled, as the model is written. To have it compiled, {do}."
        warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)
        return
    raise PlanError(
        f"{message}: this one would run as the model is written, without the plan",
        where=f"{function}, {where}",
        do=do,
    )


def _described(frame: Frame) -> tuple[str, str]:
    """Return a function's name, with the module that it is called for, and its source line."""
    module = frame.module()
    of = f" of {frame.path} ({type(module).__name__})" if frame.path else ""
    return f"{frame.name}{of}", frame.where


def _held(code: CodeType) -> Iterator[OpId]:
    """Yield the adjustable operators in earlier versions of a function, under any options."""
    for log in logs():
        for (live, _), frame in log.frames.items():
            if live is code:
                yield from (
                    ran.id for ran in frame.operators.values() if ran.kind is Kind.ADJUSTABLE
                )


def _decides_on_any(options: Options, ids: Iterable[OpId]) -> bool:
    return any(
        options.plan is None or options.plan.precision_for(op_id) is not None for op_id in ids
    )
