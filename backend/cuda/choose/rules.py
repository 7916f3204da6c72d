"""Which configurations are kernels: the rules of a configuration's operation. Which problems those serve is in `serving`.

Invariant: nothing here looks at a device.
"""

from __future__ import annotations

from typing import get_args

from qsync_fx.backend.cuda.choose import rules_conv, rules_gemm
from qsync_fx.backend.cuda.kernel.config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvOperation


def problems(config: KernelConfig) -> list[str]:
    """Returns the sentences of the rules that a configuration breaks; none if it is valid."""
    table = rules_conv if config.operation in get_args(ConvOperation) else rules_gemm
    return [rule.sentence for rule in table.broken(config)]
