"""Accuracy and loss curves of data-parallel training with compressed gradients.
Two processes train a ResNet on images, an LSTM text classifier and a GPT over loopback, with each
codec and with torch's PowerSGD hook as the peer. Rows are as codec_trainings.py describes them; a
row of the file stays if --only or --method excludes it. AQGB chooses its bits by the speed of the
loopback link, so that its row is near FP32; "aqgb12" has the fewest bits of AQGB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support import codec_trainings
from benchmarks.paper.support.codec_trainings import WHOLE
from benchmarks.paper.support.studied import METHODS, TASKS, Training

PEER = "powerSGD_hook"
WAYS = (
    *("fp16", "bf16", "1bit", "1bit*"),
    *("qsgd2", "qsgd4", "qsgd4h", "qsgd8", "qsgd16", "aqgb12", "aqgb"),
    *("duo0", "duo1", "duo2", "duo4", PEER),
)
PEER_RANK = 2
"""Rank of PowerSGD's matrices.

torch's documentation recommends starting with 1 and doubling until the accuracy suffices.
"""
PEER_BEGINS = 0.1
"""Fraction of the training in FP32 before PowerSGD starts, as its documentation recommends."""


def install(
    ddp: DistributedDataParallel, method: str, training: Training, optimizer: Optimizer, seed: int
) -> Any:
    """Install a method of `WAYS`; return the compressor if it is ours."""
    if method.startswith("duo"):
        return compress(ddp, method, optimizer=optimizer, seed=seed)
    if method == PEER:
        begins = max(2, round(PEER_BEGINS * training.steps))
        state = powerSGD_hook.PowerSGDState(None, PEER_RANK, begins, random_seed=seed)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != WHOLE:
        return compress(ddp, method, seed=seed)
    return None


if __name__ == "__main__":
    methods = {task: METHODS.get(task, WAYS) for task in TASKS}
    codec_trainings.main(__file__, __doc__, methods, install)
