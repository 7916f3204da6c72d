"""What FSDP2 reduces at once in a model, and where it is told how.

Invariant: what is private in torch's FSDP is read in this file alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from qsync_fx.communication.sharded import ShardedCompression
from qsync_fx.distributed import asked
from qsync_fx.errors import OptionError
from qsync_fx.module_tree import unwrapped

_TORCHS: Final = "DefaultReduceScatter"
"""What reduces gradients where nobody has said anything else."""


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model, or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def rows(model: nn.Module) -> dict[str, int]:
    """Returns how many values a rank keeps of each unit, by its name, with what fills up shards; of units whose gradients are reduced.

    Raises:
        OptionError: the model cannot be compressed.
    """
    found: dict[str, int] = {}
    for name, module in _units(model).items():
        groups = _groups(module)
        if len(groups) > 1:
            raise OptionError(
                "FSDP shards the parameters of one module over several meshes, and takes no reduction of ours there",
                where=name or "the model",
                do="shard the module over one mesh",
            )
        if any(type(group._reduce_scatter_comm).__name__ != _TORCHS for group in groups):
            raise OptionError(
                "the model has a reduction of its own already, and FSDP takes one",
                where=name or "the model",
                do="shard a model anew, and compress it once",
            )
        trained = [p for group in groups for p in _parameters(group) if p.requires_grad]
        if trained:
            found[name] = sum(_row(name, p) for p in trained)
    if whole := [
        name for name, p in unwrapped(model).named_parameters() if p.requires_grad and not isinstance(p, DTensor)
    ]:
        raise OptionError(
            "FSDP does not shard a parameter, and nobody averages its gradients",
            where=whole[0],
            do="call fully_shard(model) on the whole model",
        )
    return found


def reduce_by(model: nn.Module, compression: ShardedCompression) -> None:
    """Has FSDP reduce and scatter gradients of all units through `compression`."""
    modules: Any = _units(model)
    for unit in compression.units:
        modules[unit.name].set_custom_reduce_scatter(compression.scatter(unit))


def _units(model: nn.Module) -> dict[str, Any]:
    """Returns the units; several modules that are sharded together are one."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), (name, module))
    return dict(found.values())


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameters(group: Any) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def _row(name: str, parameter: Any) -> int:
    mesh, placement = parameter.device_mesh, parameter.placements[0]
    if mesh.ndim != 1 or mesh.size() != distributed.get_world_size() or not isinstance(placement, Shard):
        raise OptionError(
            f"a parameter is sharded by {parameter.placements} over {mesh}, and compressed gradients go between all ranks",
            where=name or "the model",
            do="shard over a mesh of one dimension with all ranks",
        )
    asked.compressible(name or "the model", parameter, "train this model in FP32, or without compress")
    world: int = mesh.size()
    shape: list[int] = list(parameter.shape)
    if placement.dim == 0:
        return -(-shape[0] // world) * math.prod(shape[1:])
    return math.prod(shape) // world
