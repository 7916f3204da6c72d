"""QSync's Tables IV and V for one network: the planned network is the one that is trained.
It is a ResNet-8 with 64 channels. The catalog predicts that a T4 in FP16 waits for a V100 in FP32
with it, not with 32 channels. Speed, memory, variance and accuracy belong to one model. Clusters,
training methods and columns are as in table4.py, which has more networks and seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper import table4
from benchmarks.paper.support.images import Network, Size, resnet

NETWORKS = {
    "ResNet-8, 64 channels": Network(
        lambda classes: resnet(classes, width=64), 0.2, size=Size(samples=8_000)
    )
}

if __name__ == "__main__":
    table4.main(__doc__, NETWORKS)
