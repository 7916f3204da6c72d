"""CPU optimizers with a single pass over memory: drop-in subclasses of torch.optim.

    optimizer = qsync_fx.optim.AdamW(model.parameters(), lr=1e-3)

`Adam`, `AdamW` and `SGD` override only `step`: arguments, state_dict and results are torch's.
`eligibility` selects the parameters for the kernels; start there.
"""

from __future__ import annotations

from qsync_fx.optim.adam import Adam, AdamW
from qsync_fx.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
