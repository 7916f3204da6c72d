"""Gradient averaging over samples for ranks with batches of different sizes.

If rank r has b(r) samples in a step, its gradient has the weight b(r) * ranks / sum(b) in the mean
over ranks. The sample counts are reduced with the first gradients of each step, so batch sizes may
change between steps. Weights precede codecs, so compressed gradients are weighted, too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from qsync_fx import torch_internals as internals
from qsync_fx.distributed.agreement import parallel_in, uncompiled
from qsync_fx.errors import OptionError
from qsync_fx.module_paths import unwrapped

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class SampleWeights:
    """Number of samples of this rank since the last reduction, and the weight of its gradients.

    The first pass of a step has the weight 1, and the output gradients of a later pass are scaled
    by its samples relative to the first's, so the accumulated gradient of passes of any sizes is
    the number of passes times the mean over all samples, as it is with equal sizes.
    """

    def __init__(self, joins: Callable[[], bool] = lambda: False) -> None:
        self._joins = joins
        self._samples = self._passes = self._first = self._last = 0
        self._weight = torch.ones((), dtype=torch.float64)

    @property
    def pending(self) -> bool:
        """Whether there were passes since the last reduction."""
        return self._passes > 0

    def follow(self, module: nn.Module) -> None:
        """Count the samples of each training pass of a module, and scale its output gradients."""
        module.register_forward_pre_hook(uncompiled(self._count), with_kwargs=True)
        module.register_forward_hook(uncompiled(self._scale))

    def reduce(self, group: Any, like: Tensor) -> None:
        """Compute the weight of the step from the samples of all ranks, and begin the next step."""
        if not self.pending and not self._joins():
            text = "average_by_batch counted no samples of this rank, so its gradients have no "
            text += "weight"
            do = "call model.train(), and call the model that average_by_batch was given"
            raise OptionError(text, where="the backward pass of this step", do=do)
        total = like.new_tensor(self._samples, dtype=torch.float64)
        distributed.all_reduce(total, group=group)
        share = self._first * self._passes * distributed.get_world_size(group)
        self._weight = share / total.clamp(min=1)
        self._samples = self._passes = self._first = 0

    def apply(self, gradients: Tensor) -> None:
        """Multiply gradients in place by the weight of this rank."""
        gradients.mul_(self._weight)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if not (samples := samples_in((args, kwargs))):
            text = "average_by_batch finds no samples in the arguments of the model"
            do = "pass tensors whose first dimension is the samples, in tuples, lists or dicts"
            raise OptionError(text, where=f"{type(module).__name__}.forward", do=do)
        self._first = self._first or samples
        self._last, self._samples, self._passes = samples, self._samples + samples, self._passes + 1

    def _scale(self, module: nn.Module, args: object, output: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()) or self._last == self._first:
            return output
        factor, count = self._last / self._first, 0

        def scaled(value: Any) -> Any:
            nonlocal count
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            count += 1
            # Scale gradients of this view only: other outputs may depend on `value`.
            view: Any = value.view_as(value)
            view.register_hook(lambda gradient: gradient * factor)
            return view

        result = internals.tree_map(scaled, output)
        if not count:
            text = f"average_by_batch finds no tensor with a gradient in {type(output).__name__}, "
            text += f"the output for {self._last} samples after a pass with {self._first}"
            do = "return tensors, tuples or dicts, or accumulate passes of equal sizes"
            raise OptionError(text, where=f"{type(module).__name__}.forward", do=do)
        return result


class GradientHook:
    """The communication hook of a DistributedDataParallel, which has at most one.

    It weights a bucket by `weights`, if any, and reduces it by `hook`, by default an all-reduce.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._group = parallel.process_group
        self.hook: Hook | None = None
        self.state: object = None
        self.weights: SampleWeights | None = None

        def reduce(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            return self._reduce(bucket)

        # DistributedDataParallel compares annotations with classes, but here they are strings.
        reduce.__annotations__.clear()
        parallel.register_comm_hook(None, reduce)
        _HOOKS[parallel] = self

    @classmethod
    def of(cls, parallel: DistributedDataParallel) -> GradientHook:
        """Return the hook of a model, and register it at the first call."""
        return _HOOKS.get(parallel) or cls(parallel)

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if self.weights is not None:
            if bucket.index() == 0:
                self.weights.reduce(self._group, bucket.buffer())
            self.weights.apply(bucket.buffer())
        if self.hook is not None:
            return self.hook(self.state, bucket)
        return default_hooks.allreduce_hook(self._group, bucket)


_HOOKS = weakref.WeakKeyDictionary[DistributedDataParallel, GradientHook]()
_WEIGHTED = weakref.WeakSet[nn.Module]()


def has_hook(parallel: DistributedDataParallel) -> bool:
    """Return whether gradients of a model are reduced by a hook other than `average_by_batch`."""
    if parallel in _HOOKS:
        return _HOOKS[parallel].hook is not None
    return bool(parallel._comm_hooks)


class WeightedScatter:
    """Reduce-scatter of an FSDP unit that weights gradients; torch's private protocol."""

    def __init__(self, weights: SampleWeights, scatter: Any) -> None:
        self._weights, self._scatter = weights, scatter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result: Tensor = self._scatter.allocate(size, dtype=dtype, device=device)
        return result

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: Any = False,
    ) -> Any:
        if self._weights.pending:  # the first unit of a backward pass
            self._weights.reduce(group, input_tensor)
        self._weights.apply(input_tensor)
        return self._scatter(output_tensor, input_tensor, group, op, async_op)


def average_by_batch(model: nn.Module, hook: Hook | None = None, state: object = None) -> None:
    """Average the gradients of a model over samples instead of ranks; call once before training.

    The batch size is the first dimension of the first tensor among the arguments of the model, and
    the loss is a mean over samples. Passes whose gradients are accumulated without synchronization
    are weighted by their samples, too: divide each loss by the number of passes, as with equal
    sizes. With FSDP, passes that are synchronized one by one are averaged one by one.

    Args:
        model: a DistributedDataParallel, with or without `compress`, or a model that `fully_shard`
            shards over one mesh of all ranks, after `compress` if both are used; compiled or not.
        hook, state: a communication hook of DistributedDataParallel that averages over ranks, and
            its state; by default the hook of `compress`, or else the plain all-reduce.

    Raises:
        OptionError: another model, a model that is weighted already, or a second hook. In training:
            a pass without samples, or a rank whose passes are not counted.
    """
    if averages_by_batch(model):
        text = "the gradients of the model are already averaged over samples"
        raise OptionError(text, where="average_by_batch", do="call it once for each model")
    parallel = parallel_in(model)
    if parallel is None:
        if hook is not None:
            text = "FSDP has no communication hooks of DistributedDataParallel"
            raise OptionError(text, where="average_by_batch(..., hook=...)", do="remove hook=...")
        _average_units(model)
        return
    if has_hook(parallel) and (hook is not None or parallel not in _HOOKS):
        text = (
            "the model already has a communication hook, and DistributedDataParallel supports one"
        )
        do = "create a new DistributedDataParallel, and pass the hook to average_by_batch"
        raise OptionError(text, where="average_by_batch", do=do)
    registered = GradientHook.of(parallel)
    if hook is not None:
        registered.hook, registered.state = hook, state
    registered.weights = SampleWeights(lambda: bool(parallel._join_config.enable))
    registered.weights.follow(parallel)
    _WEIGHTED.add(parallel)


def _average_units(model: nn.Module) -> None:
    root = unwrapped(model)
    if not any(isinstance(module, FSDPModule) for module in root.modules()):
        kind = type(model).__name__
        text = f"average_by_batch requires a DistributedDataParallel or FSDP model, not {kind}"
        do = "wrap the model first with DistributedDataParallel(model) or fully_shard(model)"
        raise OptionError(text, do=do)
    weights, units = SampleWeights(), reduce_scatters(root)
    if distributed.get_world_size() > 1:  # FSDP reduces no gradients of a single rank
        for module, scatter in units:
            module.set_custom_reduce_scatter(WeightedScatter(weights, scatter))
        weights.follow(root)
    _WEIGHTED.add(root)


def averages_by_batch(model: nn.Module) -> bool:
    """Return whether the gradients of a model are averaged over samples."""
    return any(module in _WEIGHTED for module in model.modules())


def samples_in(argument: Any) -> int:
    """Return the first dimension of the first tensor in arguments or a batch; 0 without one."""
    for value in internals.tree_leaves(argument):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return 0


# FSDP units, modules that `fully_shard` was called on: all reads of torch's private attributes.


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
