"""The modules of a model, by the paths that operator ids use.

Invariant: wrappers are no part of a model. A module has one path, whether it stands in DistributedDataParallel, nn.DataParallel, FSDP, a
checkpoint wrapper or the module that torch.compile returns, or in none of them; a module with several names has the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What wrappers call the module that they wrap, where no module of a user's has that name."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside of all wrappers around it; the module itself where there are none."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def paths(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module below `root` with its path, itself first, as `""`, a wrapper with the path of what it wraps."""
    yield from _walk(unwrapped(root), "", set())


def joined(*parts: str) -> str:
    """Returns one path made of several, of which any may be that of the root."""
    return ".".join(part for part in parts if part)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that the module itself holds, without those of the modules in it."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _walk(module: nn.Module, path: str, observed: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in observed:
        return
    observed.add(id(module))
    yield path, module
    inner = _inner(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, path if child is inner else joined(path, name), observed)


def _inner(module: nn.Module) -> nn.Module | None:
    children = module._modules
    if isinstance(module, DistributedDataParallel | DataParallel):
        return children.get("module")
    return next((children[name] for name in WRAPPED if children.get(name) is not None), None)
