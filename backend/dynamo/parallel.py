"""Code that was compiled outside of DistributedDataParallel is not run inside.

Inside, torch splits graphs where buckets of gradients end, so that each bucket is sent while the backward pass goes on. Dynamo does not
look for that when it has code for a function: a model that has made a step before it is wrapped would keep the code of one whole graph,
whose gradients come out together when all is computed, and nothing of them would travel meanwhile. torch's own backends train like that.

Invariant: what is compiled inside stays, wherever it runs, and so does what fits into one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.utils import get_optimize_ddp_mode
from torch._guards import Guard
from torch.nn.parallel import DistributedDataParallel

_SAYS: Final = "DistributedDataParallel does not split the graph where it runs, or has split it"


def compile_anew_where_split(inputs: Sequence[Any]) -> None:
    """Lets Dynamo compile what it compiles now once more where DistributedDataParallel would split it; called while it compiles.

    Args:
        inputs: of the graph, parameters among them.
    """
    gradients = sum(one.nbytes for one in inputs if isinstance(one, nn.Parameter) and one.requires_grad)
    if not gradients or not torch.is_grad_enabled() or DistributedDataParallel._active_ddp_module is not None:
        return

    def fits(_: object) -> bool:
        parallel = DistributedDataParallel._active_ddp_module
        return parallel is None or gradients <= parallel.bucket_bytes_cap or get_optimize_ddp_mode() != "ddp_optimizer"

    def outside_of_parallel(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(fits, [_SAYS], guard.user_stack)

    install_guard(Guard(GlobalStateSource(), outside_of_parallel))
