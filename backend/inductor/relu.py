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


def closing(node: fx.Node) -> list[Any]:
    """Returns the nodes that a ReLU's bytes, or their bits, are made by, from the comparison to `node`; none where it is neither."""
    chain: list[Any] = [node]
    while chain[0].target in _MADE_OF:
        chain.insert(0, chain[0].args[0])
    compared = chain[0].target is aten.le.Scalar and len(chain) >= 3
    converted = compared and all(one.target is prims.convert_element_type.default for one in chain[1:3])
    return chain if converted and chain[2].args[1] is BYTE else []


class EarlyBytes(CustomGraphPass):
    """Puts the bytes that a forward graph returns, to be kept, right behind the results that they come from; and their bits.

    A partitioner puts them at the end of the graph, and Inductor looks for tensors with channels last up to the last convolution only:
    bytes behind it would be transposed when they are written and when they are read.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for kept in graph.output_node().all_input_nodes:
            chain = closing(kept)
            if chain and chain[0].args[0].op != "placeholder":
                for place, moved in zip((chain[0].args[0], *chain), chain, strict=False):
                    place.append(moved)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))
