"""Which module the paths of operator ids start from, where torch.compile was given a part of a model.

Blocks are compiled alone (FSDP2, regional compilation) and follow the plan of the whole model; models are called by wrappers around them
(a training harness, a loss) and follow their own. Python's stack holds the modules that are being called around the compiled one.
Invariant: the user's option decides; else the plan, by whose modules it names; else whether one piece of the outer module is compiled or
several.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from qsync_fx.coverage.log import declared
from qsync_fx.errors import OptionError
from qsync_fx.module_tree import paths, unwrapped
from qsync_fx.options import Options
from qsync_fx.plan import Plan
from qsync_fx.plan.opid import escaped
from qsync_fx.plan.patterns import module_regex


def root_of(compiled: nn.Module, outside: Sequence[nn.Module], options: Options) -> tuple[nn.Module, str]:
    """Returns the module that ids start from, and its own path where that is none of the modules at hand.

    Args:
        compiled: what torch.compile was given.
        outside: the modules that are being called around it, innermost first.
        options: of the compilation.

    Raises:
        OptionError: the option "root" says that it is one part of the model, and it is another one.
    """
    others = (outer for outer in dict.fromkeys(outside) if outer is not compiled)
    holding = [outer for outer in others if any(module is compiled for _, module in paths(outer))]
    if options.root is not None:
        return _as_the_user_says(compiled, holding, options.root)
    candidates = [compiled, *holding]
    if len(candidates) > 1 and options.plan is not None:
        found = [named_in(outer, options.plan) for outer in candidates]
        candidates = [outer for outer, count in zip(candidates, found, strict=True) if count == max(found)]
    return (candidates[-1] if _pieces(candidates[-1]) > 1 else candidates[0]), ""


def named_in(root: nn.Module, plan: Plan) -> int:
    """Returns how many of the plan's operators and patterns name modules below `root`."""
    known = {path for path, _ in paths(root)}
    texts = [escaped(path) for path in known]
    operators = sum((op_id.module or op_id.after) in known for op_id in plan.operators)
    return operators + sum(any(map(module_regex(pattern).match, texts)) for pattern, _ in plan.patterns)


def _as_the_user_says(compiled: nn.Module, holding: Sequence[nn.Module], path: str) -> tuple[nn.Module, str]:
    for outer in holding if path else ():
        named = {name: unwrapped(module) for name, module in paths(outer)}
        if named.get(path) is compiled:
            return outer, ""
        if path in named:
            own = next(name for name, module in named.items() if module is compiled)
            raise OptionError(
                f"{type(compiled).__name__} is compiled as {path!r}, and in {type(outer).__name__}, which calls it, it is {own!r}",
                where='option "root"',
                do=f'give {{"root": {own!r}}}, or leave it out: it is found where the model calls its block',
            )
    return compiled, path


def _pieces(root: nn.Module) -> int:
    """How many modules below `root` torch.compile was given one by one."""
    inside = {id(module) for _, module in paths(root)}
    return sum(id(module) in inside for module in declared())
