"""Where in the user's model a graph stands.

Dynamo compiles one frame of Python at a time. Mostly that is the model's own forward pass, with all modules inlined. Where the graph breaks
inside a module, that module's forward is a frame of its own, and the code after the break is another one; Dynamo then knows nothing of
the model around it, and reuses the code of one layer for the next.

Invariant: what is found here depends on the model's source alone: paths are those in the whole model, wherever its graph breaks.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource
from torch._guards import CompileContext
from torch.nn.parallel import DataParallel, DistributedDataParallel

from qsync_fx.errors import PlanError

_CALLS = ("_wrapped_call_impl", "_call_impl")
_SUBSCRIPT = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_WRAPPERS = {"_modules", "_parameters", "_buffers", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RESUMES = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)")


@dataclass(frozen=True)
class Place:
    """
    Attributes:
        code: of the frame that is compiled; None outside of Dynamo.
        module: the innermost module whose forward pass the frame is part of; None in plain functions.
        root: the outermost one, which paths start from.
    """

    code: CodeType | None = None
    module: nn.Module | None = None
    root: nn.Module | None = None

    @functools.cached_property
    def paths(self) -> dict[str, str]:
        """The path of every module of the model, by what Dynamo calls it, its address."""
        named = self.root.named_modules() if self.root is not None else ()
        return {str(id(module)): clean_path(name) for name, module in named}

    @property
    def path(self) -> str:
        """The path of the innermost module."""
        return self.paths.get(str(id(self.module)), "")

    @property
    def nested(self) -> bool:
        """Whether the frame is only a part of the model, called by code that Dynamo could not compile with it."""
        return self.module is not self.root

    @property
    def resumes_at(self) -> int | None:
        """The line that the frame resumes at after a graph break; None for a frame that starts at its first line."""
        found = _RESUMES.fullmatch(self.code.co_name) if self.code is not None else None
        return int(found[1]) if found else None


def clean_path(path: str) -> str:
    """Turns Dynamo's spelling of a module, `L['self']._modules['fc'][0]`, into state_dict's, `fc.0`."""
    if path.startswith(("L[", "G[")):
        path = path.partition("]")[2]
    path = _SUBSCRIPT.sub(r".\1", path)
    return ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)


def place() -> Place:
    """Returns where the graph stands that Dynamo is compiling."""
    tx = translator()
    modules = list(_modules(sys._getframe()))
    while len(modules) > 1 and isinstance(modules[-1], DistributedDataParallel | DataParallel):
        modules.pop()
    code = tx.f_code if tx is not None else None
    return Place(code, modules[0], modules[-1]) if modules else Place(code)


def compile_for_this_module_only(here: Place) -> None:
    """Keeps Dynamo from using the code of a part of the model, such as one layer, for the next one, whose plan may be another.

    Raises:
        PlanError: the model has more such parts than Dynamo keeps code for.
    """
    tx = translator()
    name = next((name for name, value in tx.f_locals.items() if value is here.module), None) if tx is not None else None
    if not here.nested or name is None or here.root is None:
        return
    alike = sum(type(module) is type(here.module) for module in here.root.modules())
    limit = torch._dynamo.config.recompile_limit
    if alike > limit:
        raise PlanError(
            f"the graph breaks inside {type(here.module).__name__}, of which the model has {alike}; each needs code of its own to "
            f"follow the plan, and torch._dynamo.config.recompile_limit is {limit}",
            where=f"module {here.path}, {here.code.co_filename}:{here.code.co_firstlineno}" if here.code else None,
            do=f"set torch._dynamo.config.recompile_limit = {4 * alike}, or remove the graph break "
            "(TORCH_LOGS=graph_breaks shows it)",
        )
    install_guard(LocalSource(name).make_guard(GuardBuilder.ID_MATCH))


def in_backward_pass() -> bool:
    """Whether the graph is one of compiled autograd's: the backward pass of graphs that the plan has had its say on."""
    compilation = CompileContext.current_compile_id()
    return compilation is not None and compilation.compiled_autograd_id is not None


def warn_at_the_limit(here: Place) -> None:
    """Warns where Dynamo may compile a frame for the last time: what it compiles no more runs as written, without the plan."""
    compilation = CompileContext.current_compile_id()
    limit = torch._dynamo.config.recompile_limit
    if here.code is None or compilation is None or compilation.frame_compile_id != limit - 1:
        return
    text = (
        f"this is version {limit} of {here.code.co_qualname}, and Dynamo keeps {limit} of a function: another one will run as the model "
        "wrote it, without the plan. Set torch._dynamo.config.recompile_limit higher if so many are meant; TORCH_LOGS=recompiles tells "
        "why each was made."
    )
    warnings.warn_explicit(text, UserWarning, here.code.co_filename, here.code.co_firstlineno)


def translator() -> Any:
    """Returns Dynamo's translator of the frame that is compiled; None outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def _modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """Yields the modules that are being called between torch.compile and the frame that is compiled, innermost first."""
    found: list[nn.Module] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("torch/_dynamo/convert_frame.py"):
            found.clear()  # calls on this side are the compiler's
        elif file.endswith("torch/_dynamo/eval_frame.py") and name in ("compile_wrapper", "_fn"):
            break
        elif file.endswith("torch/nn/modules/module.py") and name in _CALLS:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and not (found and found[-1] is module):
                found.append(module)
        frame = frame.f_back
    yield from found
