"""FSDP units of a model and their reduce-scatters: all reads of private attributes of torch's FSDP.

A unit is a module that `fully_shard` was called on, or several that it sharded together.
"""

from __future__ import annotations

import math
from typing import Any

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from qsync_fx.errors import OptionError
from qsync_fx.module_paths import unwrapped


def fsdp_units(model: nn.Module) -> dict[str, Any]:
    """Return the FSDP units by name; raise `OptionError` if a trained parameter is in none."""
    result: dict[int, tuple[str, Any]] = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, FSDPModule):
            result.setdefault(id(module._get_fsdp_state()), (name, module))
    for name, p in unwrapped(model).named_parameters():
        if p.requires_grad and not isinstance(p, DTensor):
            text = "FSDP does not shard the parameter, so its gradients are not averaged"
            raise OptionError(text, where=name, do="call fully_shard(model) on the root module")
    return dict(result.values())


def unit_rows(model: nn.Module) -> dict[str, int]:
    """Return the number of values in each trained unit's padded shard, by unit name."""
    result: dict[str, int] = {}
    for name, module in fsdp_units(model).items():
        where, groups = name or "the model", _groups(name, module)
        reductions = {type(group._reduce_scatter_comm).__name__ for group in groups}
        if reductions - {"DefaultReduceScatter"}:
            text = "the model already has a custom reduce-scatter, and FSDP supports one"
            do = "shard a new model, and call compress once, before average_by_batch"
            raise OptionError(text, where=where, do=do)
        if trained := _trained(groups):
            result[name] = sum(_row(where, p) for p in trained)
    return result


def reduce_scatters(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return each trained unit and its reduce-scatter; raise `OptionError` if it has several.

    Units over a part of the ranks raise, too: their gradients are reduced in two steps.
    """
    result = []
    for name, module in fsdp_units(model).items():
        groups = _groups(name, module)
        if trained := _trained(groups):
            for parameter in trained:
                _row(name or "the model", parameter)
            result.append((module, groups[0]._reduce_scatter_comm))
    return result


def _groups(name: str, module: Any) -> list[Any]:
    """Return the parameter groups of a unit, at most one; raise `OptionError` if it has more."""
    state = module._get_fsdp_state()
    # Versions of torch differ: one group, or a list.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    result = [group for group in groups if group is not None]
    if len(result) > 1:
        text = "FSDP shards the module over several meshes, which is not supported"
        raise OptionError(text, where=name or "the model", do="shard the module over one mesh")
    return result


def _trained(groups: list[Any]) -> list[Any]:
    parameters = [item.sharded_param for group in groups for item in group.fsdp_params]
    return [parameter for parameter in parameters if parameter.requires_grad]


def _row(where: str, parameter: Any) -> int:
    """Return the values of a parameter's padded shard; raise `OptionError` unless all ranks have
    one.
    """
    mesh, placement = parameter.device_mesh, parameter.placements[0]
    world = distributed.get_world_size()
    if mesh.ndim != 1 or mesh.size() != world or not isinstance(placement, Shard):
        text = f"the parameter has {parameter.placements} over {mesh}, not one shard on each rank"
        raise OptionError(text, where=where, do="shard over a one-dimensional mesh of all ranks")
    shape: list[int] = list(parameter.shape)
    if placement.dim == 0:
        return -(-shape[0] // world) * math.prod(shape[1:])
    return math.prod(shape) // world
