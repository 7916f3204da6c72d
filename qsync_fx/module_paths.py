"""Module paths of a model, as operator ids use them.

Invariant: wrappers do not change paths. A module has the same path inside DistributedDataParallel,
nn.DataParallel, FSDP, a checkpoint wrapper or the result of torch.compile as without them. A module
with several names has the path of the first.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attribute names by which wrappers store the wrapped module; users' modules do not use them."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers; the module itself without wrappers."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def paths(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for `root` with path "" and all modules below it.

    A wrapper has the path of the module that it wraps.
    """
    yield from _walk(unwrapped(root), "", set())


def joined(*parts: str) -> str:
    """Return the concatenation of paths, where "" is the path of the root."""
    return ".".join(part for part in parts if part)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the module itself, without its submodules."""
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
