"""Backward decompositions for Inductor on the CPU: gradients of eager mode, and saved tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_fx.backend.inductor import inductor_config, recompute_policy
from qsync_fx.backend.inductor.decompositions import max_pool2d_gradient
from qsync_fx.backend.inductor.recompute_policy import gate
from qsync_fx.devices.cpu_features import cpu_multiplies_integers
from qsync_fx.profiler.timing.measured_memory import measured_peak
from tests.support import tiers
from tests.support.compiling.early_bytes import Graphs

aten = torch.ops.aten
CHECKS = ("test_schema", "test_faketensor")


def gradients(
    function: Callable[..., Tensor], x: Tensor, incoming: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the input gradients in eager mode and compiled."""
    # Dynamo compiles at most 8 versions of a function and runs further ones in eager mode.
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend="qsync", options={"precision": "fp32"})):
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        run(leaf).backward(incoming)  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        results.append(leaf.grad)
    return results[0], results[1]


@pytest.mark.parametrize("channels_last", [False, True])
def test_relu_passes_the_gradients_that_eager_mode_passes(channels_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 19, 5, 7)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45])
    x[0, 3, 2], x[1, 18, 4] = special, special
    # The same values at random positions, of special and of other inputs.
    incoming = torch.randn(x.shape)
    incoming[:, :, 2:] = special[torch.randint(0, 7, (2, 19, 3, 7))]
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)

    # The product does not save the ReLU's output, so only a mask is saved.
    eager, compiled = gradients(lambda x: torch.relu(x) * 2.0, x, incoming)

    assert torch.equal(eager.nan_to_num(3.0, 5.0, 7.0), compiled.nan_to_num(3.0, 5.0, 7.0))
    assert torch.equal(eager.isnan(), compiled.isnan())


POOLED = [
    (shape, window)
    for shape in ((2, 5, 11, 9), (3, 8, 7))
    for window in ((3, 2, 1, 1, False), (2, 2, 0, 1, False), ((2, 3), (2, 1), (1, 1), (1, 2), True))
]


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        POOLED[0],
        *(pytest.param(*POOLED[index], marks=tiers.ALL) for index in (2, 4)),
        *(pytest.param(*POOLED[index], marks=tiers.EVERY) for index in (1, 3, 5)),
    ],
)
def test_max_pooling_passes_the_gradients_that_eager_mode_passes(
    shape: tuple[int, ...], window: Any
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    kernel, stride, padding, dilation, ceil_mode = window

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x.sin(), kernel, stride, padding, dilation, ceil_mode)

    eager, compiled = gradients(pool, x, torch.randn(pool(x).shape))

    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_of_max_pooling_needs_no_input(
    dtype: torch.dtype, channels_last: bool
) -> None:
    torch.manual_seed(0)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 5, 11, 9).to(dtype).contiguous(memory_format=memory_format)
    window = [3, 3], [2, 2], [1, 1], [1, 1], False
    y, indices = aten.max_pool2d_with_indices.default(x, *window)
    incoming = torch.randn_like(y)

    result = max_pool2d_gradient(incoming, indices, x.shape, *window)

    assert torch.equal(
        result, aten.max_pool2d_with_indices_backward.default(incoming, x, *window, indices)
    )
    assert result.stride() == x.stride()
    torch.library.opcheck(
        torch.ops.qsync.max_pool2d_gradient.default,
        (incoming, indices, x.shape, *window),
        test_utils=CHECKS,
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_of_max_pooling_allocates_its_result_alone(channels_last: bool) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 8, 16, 16).contiguous(memory_format=memory_format)
    window = [2, 2], [2, 2], [0, 0], [1, 1], False
    y, indices = aten.max_pool2d_with_indices.default(x, *window)

    peak_bytes = measured_peak(lambda: max_pool2d_gradient(y, indices, x.shape, *window))

    assert peak_bytes == x.nbytes


def test_closed_gate_blocks_nonfinite_gradients() -> None:
    incoming = torch.tensor(
        [1.0, float("nan"), float("inf"), 2.0, float("nan")], dtype=torch.bfloat16
    )
    closed = torch.tensor([1, 1, 1, 0, 0], dtype=torch.int8)

    result = gate(incoming, closed)

    assert result.tolist()[:4] == [0.0, 0.0, 0.0, 2.0]
    assert result[4].isnan()
    assert result.dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.qsync.gate.default, (incoming, closed), test_utils=CHECKS)


@tiers.ALL
def test_quantized_layer_after_relu_saves_no_bool_mask() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )
    graphs = Graphs()

    with torch._inductor.config.patch(post_grad_custom_pre_pass=graphs):
        step = torch.compile(model, backend="qsync", options={"precision": "int8"})
        step(torch.randn(2, 3, 16, 16)).sum().backward()

    forward = graphs.seen[0]
    saved = [node for node in forward.output_node().all_input_nodes if node.op == "call_function"]
    assert not [node for node in saved if node.meta["val"].dtype == torch.bool]
    order = {node: index for index, node in enumerate(forward.nodes)}
    # The layers save outputs of the quantizer, which are selected by getitem.
    closed = [
        node
        for node in saved
        if node.meta["val"].dtype == torch.int8 and node.target != operator.getitem
    ]
    assert len(closed) == 2
    if cpu_multiplies_integers():
        # The last convolution has an FP32 output and runs in integers.
        target = torch.ops.qsync.integer_convolution.default
        (last,) = forward.find_nodes(op="call_function", target=target)
        assert all(order[node] < order[last] for node in closed)


def test_custom_pass_is_not_replaced() -> None:
    theirs = Graphs()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=theirs):
        assert inductor_config.inductor(torch.device("cpu"))["post_grad_custom_pre_pass"] is theirs
    assert isinstance(
        inductor_config.inductor(torch.device("cpu"))["post_grad_custom_pre_pass"],
        recompute_policy.EarlyBytes,
    )
