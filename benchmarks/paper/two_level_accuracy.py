"""Accuracy of training with two-level reductions in few bits, and of DUO, on four ranks.
Four processes in two simulated nodes train as in codec_accuracy.py, with half as many steps of
twice the samples. "8 and 4 bits, h" has gradients in 8 bits inside nodes and 4 bits with the
Hadamard transform between them, as SDP4Bit; "4 and 4 bits" has 4 bits on both levels, as ZeRO++.
Both round stochastically. "8 and 1 bits" has 1bitSGD* between nodes, with error feedback, which
SDP4Bit lacks. SDP4Bit and ZeRO++ also compress weights, these trainings only gradients. "duo4" and
"duo1" are DUO with a fast reduction in 4 bits and 1 bit and the same nodes. Rows are as
codec_trainings.py describes them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.support import codec_trainings
from benchmarks.paper.support.studied import Training

RANKS, NODE = 4, 2
"""Ranks in total and in a node."""
DUO = ("duo4", "duo1")
LEVELS = {
    "8 and 4 bits, h": ("qsgd8", "qsgd4h"),
    "4 and 4 bits": ("qsgd4", "qsgd4"),
    "8 and 1 bits": ("qsgd8", "1bit*"),
}
"""Codecs inside and between nodes."""
METHODS = dict.fromkeys(("ResNet-8, images", "GPT, next word"), (*LEVELS, *DUO))


def install(
    ddp: DistributedDataParallel, method: str, training: Training, optimizer: Optimizer, seed: int
) -> Any:
    """Install a method; return its compressor, or None in FP32."""
    if method in DUO:
        return compress(ddp, method, optimizer=optimizer, hierarchical=NODE, seed=seed)
    if method == codec_trainings.WHOLE:
        return None
    inside, between = LEVELS[method]
    return compress(ddp, between, inside=inside, hierarchical=NODE, seed=seed)


if __name__ == "__main__":
    codec_trainings.main(__file__, __doc__, METHODS, install, RANKS)
