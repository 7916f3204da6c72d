"""Gradient averaging over samples for ranks with batches of different sizes.

If rank r has b(r) samples, its gradient has the weight b(r) * ranks / sum(b). The sample counts are
reduced with the first bucket of each step, so batch sizes may change between steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from qsync_fx.distributed.agreement import parallel_in, uncompiled
from qsync_fx.errors import OptionError
from qsync_fx.torch_internals import tree_leaves

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
_WEIGHTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def average_by_batch(model: nn.Module, hook: Hook | None = None, state: object = None) -> None:
    """Average the gradients of a model over samples instead of ranks; call once before training.

    The batch size is the first dimension of the first argument. Passes under `no_sync` add up.

    Args:
        model: a DistributedDataParallel, compiled or not.
        hook, state: a communication hook of DistributedDataParallel that averages over ranks, and
            its state; by default the plain all-reduce.
    """
    parallel = parallel_in(model)
    if parallel is None:
        text = f"average_by_batch requires a DistributedDataParallel, not {type(model).__name__}"
        raise OptionError(text, do="wrap the model first with DistributedDataParallel(model)")
    group = parallel.process_group
    samples, weight = 0, torch.tensor(1.0)

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal samples
        if module.training and torch.is_grad_enabled():
            samples += samples_in((args, kwargs))

    def weigh(value: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal samples, weight
        gradients: torch.Tensor = bucket.buffer()
        if bucket.index() == 0:
            total = gradients.new_tensor(samples, dtype=torch.float64)
            distributed.all_reduce(total, group=group)
            share = samples * distributed.get_world_size(group)
            weight, samples = share / total.clamp(min=1), 0
        gradients.mul_(weight.to(gradients.dtype))
        return hook(value, bucket) if hook else default_hooks.allreduce_hook(group, bucket)

    # DistributedDataParallel compares annotations with classes, but here they are strings.
    weigh.__annotations__.clear()
    parallel.register_forward_pre_hook(uncompiled(count), with_kwargs=True)
    parallel.register_comm_hook(state, weigh)
    _WEIGHTED.add(parallel)


def averages_by_batch(model: nn.Module) -> bool:
    """Return whether the gradients of a model are averaged over samples."""
    return parallel_in(model) in _WEIGHTED


def samples_in(argument: Any) -> int:
    """Return the first dimension of the first tensor in arguments or a batch; 0 without one."""
    for value in tree_leaves(argument):
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    return 0
