"""What ReLU keeps for its backward pass on the CPU: a byte an element, in the layout of the tensor that it says something about.

Where the result itself is not kept, as in front of a quantized layer, Inductor keeps a bool, and its C++ writes and reads bools one at a
time: in a residual block of ResNet that took longer than the normalization that it is fused with. Bytes are converted in vectors.

Invariant: gradients are those of `aten::threshold_backward`, to the bit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from qsync_fx.backend.operators.bits import BYTE
from qsync_fx.backend.operators.gradients.gate import gate

aten, prims = torch.ops.aten, torch.ops.prims
_MADE_OF: Final = (prims.convert_element_type.default, aten.permute.default, torch.ops.qsync.pack_bits.default)
"""What becomes of a comparison: bytes, and of these with channels last their bits (`qsync_fx.backend.inductor.closed_bits`)."""


def threshold_backward(gradient: Tensor, result: Tensor, threshold: float) -> Tensor:
    """The decomposition; made of what a partitioner may compute again where the result is kept anyway.

    Of the tensors on the way it keeps the smallest, and of equal ones that which is nearest to the backward pass: the byte.
    """
    return gate(gradient, (result <= threshold).to(torch.float32).to(BYTE))


def lower_gate(gradient: Any, closed: Any) -> Any:
    """Inductor's lowering of `qsync::gate`: elementwise, and in FP32, whose masks it has vectors for."""
    from torch._inductor.lowering import lowerings, to_dtype

    is_closed = lowerings[aten.gt.Scalar](to_dtype(closed, torch.float32), 0.0)
    return lowerings[aten.where.self](is_closed, 0.0, gradient)


class EarlyBytes(CustomGraphPass):
    """Puts the bytes that a forward graph returns, to be kept, right behind the results that they come from; and their bits.

    A partitioner puts them at the end of the graph, and Inductor looks for tensors with channels last up to the last convolution only:
    bytes behind it would be transposed when they are written and when they are read.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.le.Scalar):
            chain = [node]
            while len(chain[-1].users) == 1:
                (follower,) = chain[-1].users
                if follower.target not in _MADE_OF:
                    break
                chain.append(follower)
            if len(chain) < 3 or [one.target for one in chain[1:3]] != [prims.convert_element_type.default] * 2:
                continue
            kept = graph.output_node() in chain[-1].users and node.args[0].op != "placeholder"
            if chain[2].args[1] is BYTE and kept:
                for place, moved in zip((node.args[0], *chain), chain, strict=False):
                    place.append(moved)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
