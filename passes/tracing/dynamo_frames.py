"""Position of a graph in the user's model, and the root module of its operator ids.

Dynamo compiles one Python frame at a time and, after a graph break, does not know the enclosing
model; Python's stack shows the modules that are being called. Paths start at the root module.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch import nn

from qsync_fx import torch_internals as internals
from qsync_fx.coverage.compilation_log import declared
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.module_paths import WRAPPED, joined, paths, unwrapped
from qsync_fx.options import Options
from qsync_fx.plan.operator_id import escaped, module_regex
from qsync_fx.plan.plan import Plan


def root_of(
    compiled: nn.Module, outside: Sequence[nn.Module], options: Options
) -> tuple[nn.Module, str]:
    """Return the root module of ids, and its path if its enclosing model is unknown.

    Blocks compiled alone (FSDP2, regional compilation) follow the plan of the whole model. A model
    called by a wrapper (a training harness, a loss) follows its own plan. The option "root"
    decides; else the module that most entries of the plan name; among several, the outermost if
    more than one piece of it is compiled, else the innermost.

    `compiled` is the argument of torch.compile; `outside` are the modules that are being called
    around it, innermost first. If "root" names another module, it raises `OptionError`.
    """
    others = (outer for outer in dict.fromkeys(outside) if outer is not compiled)
    holding = [outer for outer in others if any(module is compiled for _, module in paths(outer))]
    if options.root is not None:
        return _as_the_user_says(compiled, holding, options.root)
    candidates = [compiled, *holding]
    if len(candidates) > 1 and options.plan is not None:
        counts = {outer: _named_in(outer, options.plan) for outer in candidates}
        candidates = [outer for outer in candidates if counts[outer] == max(counts.values())]
    outermost = candidates[-1]
    inside = {id(module) for _, module in paths(outermost)}
    if sum(id(module) in inside for module in declared()) > 1:
        return outermost, ""
    return candidates[0], ""


def _named_in(root: nn.Module, plan: Plan) -> int:
    """Return how many of the plan's operators and patterns name modules below `root`."""
    available = {path for path, _ in paths(root)}
    texts = [escaped(path) for path in available]
    patterns = (module_regex(pattern).match for pattern, _ in plan.patterns)
    operators = sum((op_id.module or op_id.after) in available for op_id in plan.operators)
    return operators + sum(any(map(match, texts)) for match in patterns)


def _as_the_user_says(
    compiled: nn.Module, holding: Sequence[nn.Module], path: str
) -> tuple[nn.Module, str]:
    for outer in holding if path else ():
        named = {name: unwrapped(module) for name, module in paths(outer)}
        owned = next(name for name, module in named.items() if module is compiled)
        if path == owned:
            return outer, ""
        if path in named:
            message = f"{type(compiled).__name__} is compiled as {path!r}, and in "
            message += f"{type(outer).__name__}, which calls it, it is {owned!r}"
            do = f'set {{"root": {owned!r}}}, or remove the option to detect the path'
            raise OptionError(message, where='option "root"', do=do)
    return compiled, path


_CALLS = ("_wrapped_call_impl", "_call_impl")
_SUBSCRIPT = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_CONTAINERS = {"_modules", "_parameters", "_buffers", *WRAPPED}
_RESUMES = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)")


@dataclass(frozen=True)
class SourcePlace:
    """Position of the compiled frame in the user's model.

    Attributes:
        code: code of the compiled frame; None outside of Dynamo.
        module: the innermost module whose forward pass contains the frame; None in plain functions.
        root: the module that paths start from, the whole model; None in plain functions.
        within: the path of `root`, if the option "root" says that it is part of a larger model.
        entered: whether the frame is the argument of torch.compile, not a callee or a continuation.
        called_modules: modules that a plain function may call, each with a path prefix for ids.
    """

    code: CodeType | None = None
    module: nn.Module | None = None
    root: nn.Module | None = None
    within: str = ""
    entered: bool = False
    called_modules: tuple[tuple[str, nn.Module], ...] = ()

    @functools.cached_property
    def modules(self) -> dict[str, tuple[str, nn.Module]]:
        """Every module of the model with its path, by address, which is Dynamo's key."""
        roots = self.called_modules if self.root is None else ((self.within, self.root),)
        starts = ((start, item) for start, root in reversed(roots) for item in paths(root))
        named = ((joined(start, path), module) for start, (path, module) in starts)
        return {str(id(module)): (path, module) for path, module in named}

    def path_of(self, address: str) -> str | None:
        """Return the path of the module at an address; None if it is not part of the model."""
        return self.modules.get(address, (None,))[0]

    @property
    def path(self) -> str:
        """The path of the innermost module."""
        return self.path_of(str(id(self.module))) or ""

    @property
    def nested(self) -> bool:
        """Whether the frame is only a part of the model, called by uncompiled code."""
        return self.module is not self.root or bool(self.within)

    @property
    def resumes_at(self) -> int | None:
        """The line where the frame resumes after a graph break; None for the first line."""
        result = self.code and _RESUMES.fullmatch(self.code.co_name)
        return int(result[1]) if result else None


def clean_path(path: str) -> str:
    """Convert Dynamo's name of a module, `L['self']._modules['fc'][0]`, to `fc.0`."""
    if path.startswith(("L[", "G[")):
        path = path.partition("]")[2]
    path = _SUBSCRIPT.sub(r".\1", path)
    return ".".join(part for part in path.split(".") if part and part not in _CONTAINERS)


def place(options: Options) -> SourcePlace:
    """Return the position of the graph that Dynamo is compiling."""
    tx = translator()
    code = getattr(tx, "f_code", None)
    around = calls(sys._getframe())
    chain = [unwrapped(module) for module in around.inside]
    outside: list[nn.Module] = []
    if isinstance(around.compiled, nn.Module):
        chain.append(unwrapped(around.compiled))
        outside = [unwrapped(module) for module in around.outside]
    if chain:
        root, within = root_of(chain[-1], outside, options)
        return SourcePlace(code, chain[0], root, within, around.entered(code))
    inputs: Iterable[tuple[str, nn.Module]] = ()
    if code is not None:
        inputs = modules_in_reach(code, tx.f_locals, tx.f_globals)
    return SourcePlace(code, entered=around.entered(code), called_modules=tuple(inputs))


def compile_for_this_module_only(current: SourcePlace) -> bool:
    """Guard a submodule's code against reuse for another module; return whether it was needed."""
    source = None if current.module is None else _source_of(current.module)
    if not current.nested or source is None or current.root is None:
        return False
    kind = type(current.module)
    equal = sum(type(module) is kind for _, module in paths(current.root))
    limit = internals.dynamo_config.recompile_limit
    # Most instances of torch's own classes are inlined into a larger graph and need no code.
    if equal > limit and (not kind.__module__.startswith("torch.") or _last_version()):
        where = f"module {current.path}"
        if current.code is not None:
            where += f", {current.code.co_filename}:{current.code.co_firstlineno}"
        message = f"{kind.__name__} is compiled separately, because the graph breaks inside or it "
        message += f"is an argument of torch.compile; the model has {equal} of this class, each "
        message += "needs its own code to follow the plan, and "
        message += f"torch._dynamo.config.recompile_limit is {limit}"
        do = f"set torch._dynamo.config.recompile_limit = {4 * equal}, or remove the graph break "
        raise PlanError(message, where=where, do=f"{do}(TORCH_LOGS=graph_breaks shows it)")
    internals.install_guard(source.make_guard(internals.GuardBuilder.ID_MATCH))
    return True


def _source_of(module: nn.Module) -> Any:
    """Return how the compiled frame refers to a module: a variable, or the owner of a method."""
    for name, value in getattr(translator(), "f_locals", {}).items():
        if value is module:
            return internals.LocalSource(name)
        if getattr(value, "__self__", None) is module:
            return internals.AttrSource(internals.LocalSource(name), "__self__")
    return None


def in_backward_pass() -> bool:
    """Return whether compiled autograd compiles a backward pass; its forward followed the plan."""
    compilation = internals.CompileContext.current_compile_id()
    return compilation is not None and compilation.compiled_autograd_id is not None


def warn_at_the_limit(current: SourcePlace) -> None:
    """Warn if Dynamo reaches its recompile limit: with a plan, another version is an error."""
    limit = internals.dynamo_config.recompile_limit
    if current.code is None or not _last_version():
        return
    name = current.code.co_qualname
    if current.module is not None and "torch/_dynamo/" in current.code.co_filename:
        name = f"{type(current.module).__name__}.forward"
    text = (
        f"this is version {limit} of {name}, and Dynamo compiles "
        f"at most {limit} of a function. Another version would ignore the plan and is an error. "
        "Raise torch._dynamo.config.recompile_limit if the model needs more; "
        "TORCH_LOGS=recompiles shows the reason for each version"
    )
    warnings.warn_explicit(text, UserWarning, current.code.co_filename, current.code.co_firstlineno)


def _last_version() -> bool:
    """Return whether Dynamo compiles a frame for the last time before its recompile limit."""
    compilation = internals.CompileContext.current_compile_id()
    last = internals.dynamo_config.recompile_limit - 1
    return compilation is not None and compilation.frame_compile_id == last


def translator() -> Any:
    """Return Dynamo's translator of the compiled frame; None outside of Dynamo."""
    try:
        return internals.InstructionTranslator.current_tx()
    except AttributeError:
        return None


@dataclass
class Calls:
    """The calls on Python's stack around the compiled frame, and its caller.

    `inside` has the modules that are being called between torch.compile and the frame, `outside`
    those around the argument of torch.compile, `compiled`, both innermost first.
    """

    caller: FrameType | None = None
    inside: list[nn.Module] = field(default_factory=list)
    compiled: object = None
    outside: list[nn.Module] = field(default_factory=list)

    def entered(self, code: CodeType | None) -> bool:
        """Return whether the frame is the compiled function or the compiled module's forward."""
        if self.caller is None or code is None:
            return False
        if _compiles(self.caller):
            return True
        # Hooks have the same caller as the module's own forward pass.
        return isinstance(self.compiled, nn.Module) and any(
            getattr(module.forward, "__code__", None) is code
            and unwrapped(module) is unwrapped(self.compiled)
            for module in _called(self.caller)
        )


def calls(frame: FrameType | None) -> Calls:
    """Return the calls around the compiled frame, from `frame` up."""
    result = Calls()
    while frame is not None and not _compiles(frame):
        if _is_compiler(frame):
            result = Calls()  # the calls so far belong to the compiler
        else:
            result.caller = result.caller or frame
            result.inside += _called(frame)
        frame = frame.f_back
    if frame is None:
        return result
    result.caller = result.caller or frame
    result.compiled = given_to_compile(frame.f_locals["fn"])
    outer = frame.f_back
    while outer is not None and not _is_compiler(outer):
        result.outside += _called(outer)
        outer = outer.f_back
    return result


def modules_in_reach(
    code: CodeType, local: Mapping[str, Any], everywhere: Mapping[str, Any]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules among a function's variables and their attributes (`self.model`)."""
    values = [*local.values(), *(everywhere[name] for name in code.co_names if name in everywhere)]
    yield from (("", value) for value in values if isinstance(value, nn.Module))
    for value in values:
        if not isinstance(value, nn.Module | ModuleType | type):
            attributes = getattr(value, "__dict__", {}).items()
            yield from (item for item in attributes if isinstance(item[1], nn.Module))


def given_to_compile(function: object) -> object:
    """Return the module behind the function that torch.compile makes of it, else the function."""
    wrapped = getattr(function, "__wrapped__", None)  # torch's own classes get an additional frame
    owners = (getattr(value, "__self__", None) for value in (function, wrapped))
    modules = (value for value in (function, wrapped, *owners) if isinstance(value, nn.Module))
    return next(modules, function)


def _is_compiler(frame: FrameType) -> bool:
    if frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py"):
        return True
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name == "__call__" and isinstance(owner, internals.CatchErrorsWrapper)


def _compiles(frame: FrameType) -> bool:
    """Return whether a frame is torch.compile's wrapper around a function."""
    if frame.f_code.co_name not in ("compile_wrapper", "_fn"):
        return False
    in_dynamo = frame.f_code.co_filename.endswith("torch/_dynamo/eval_frame.py")
    return in_dynamo and isinstance(frame.f_locals.get("self"), internals.OptimizeContext)


def _called(frame: FrameType) -> list[nn.Module]:
    """Return the module whose call a frame is, in a list; [] for other frames."""
    code = frame.f_code
    if code.co_name not in _CALLS or not code.co_filename.endswith("torch/nn/modules/module.py"):
        return []
    module = frame.f_locals.get("self")
    return [module] if isinstance(module, nn.Module) else []
