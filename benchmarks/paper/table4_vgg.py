"""QSync's Tables IV and V for a VGG without batch norm, as the paper's VGG-16.
It has six convolutions, and He's initial weights as in torchvision. Its learning rate is a fifth of
VGG-6-BN's: with larger rates, some seeds do not learn. Clusters, training methods and columns are
as in table4.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper import table4
from benchmarks.paper.support.images import Network, vgg
from benchmarks.support.models import initialize_convolutions


def plain_vgg(classes: int, width: int = 8) -> nn.Module:
    """Return a VGG without batch norm, for images of one channel."""
    model = vgg(classes, width, batch_norm=False)
    initialize_convolutions(model)
    return model


NETWORKS = {"VGG-6": Network(plain_vgg, 0.02, lambda classes: plain_vgg(classes, width=128))}

if __name__ == "__main__":
    table4.main(__doc__, NETWORKS)
