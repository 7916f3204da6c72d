"""State of the process after a model is compiled and run: the same as in eager mode.

Dynamo writes context managers as calls whose result has no reader: grad mode, inference mode,
autocast, levels of functorch and of forward-mode differentiation, saved-tensor hooks, backends of
SDPA, deterministic algorithms, the default dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, fx
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.support import tiers

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._C._autograd._saved_tensors_hooks_enable()
    torch._C._set_fwd_grad_enabled(True)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def process_state() -> dict[str, Any]:
    """Return all state of the process that a call in a Dynamo graph may change."""
    devices = ("cpu", "cuda")
    cuda = torch.backends.cuda
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward-mode gradients": torch._C._is_fwd_grad_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
        "cache of autocast": torch.is_autocast_cache_enabled(),
        "nesting of autocast": (
            torch.autocast_increment_nesting(),
            torch.autocast_decrement_nesting(),
        ),
        "functorch levels": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "dual level": forward_ad._current_level,
        "saved-tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "active saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "deterministic": torch.get_deterministic_debug_mode(),
        "SDPA": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            tuple(torch._C._get_sdp_priority_order()),
        ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "torch functions": (
            torch._C._is_torch_function_enabled(),
            torch._C._len_torch_function_stack(),
        ),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "random numbers": torch.get_rng_state().tolist(),
    }


def sine(x: Tensor) -> Tensor:
    return x.sin().square().sum()


def in_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return y + x


def with_grad_mode_set(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y + x


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x.shape[0] * 2
    return x * y


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        y = x @ x
    return y + 1


def in_sdpa_kernel(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(x, x, x)
    return y + 1


def in_sdpa_kernels_by_priority(x: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        y = F.scaled_dot_product_attention(x, x, x)
    return y + 1


def deterministic(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    y = x * 2
    torch.use_deterministic_algorithms(False)
    return y + x


def in_another_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    y = torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return x + y


def in_matmul_precision(x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("highest")
    return x @ x


def without_saved_tensor_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        y = x.sin()
    return y * 2


def without_forward_gradients(x: Tensor) -> Tensor:
    with forward_ad._set_fwd_grad_enabled(False):
        y = x.sin()
    return y * 2


def in_a_dual_level(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos()).sin()
        tangent: Tensor = forward_ad.unpack_dual(dual).tangent
    return tangent * 2


def without_torch_functions(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        y = x.sin()
    return y * 2


def with_grad_mode_set_in_vmap(x: Tensor) -> Tensor:
    def row(y: Tensor) -> Tensor:
        with torch.no_grad():
            z = y * 2
        return z + y

    return vmap(row)(x)


def with_random_numbers(x: Tensor) -> Tensor:
    return vmap(lambda y: y + torch.rand_like(y), randomness="different")(x)


def checkpointed(x: Tensor) -> Tensor:
    def body(y: Tensor) -> Tensor:
        with torch.no_grad():
            z = y * 2
        return (z + y).sin()

    result: Tensor = checkpoint(body, x, use_reentrant=False)
    return result


def pulled_back(x: Tensor) -> Tensor:
    result, pull = vjp(torch.sin, x)
    gradient: Tensor = pull(result)[0]
    return gradient


TRANSFORMS: dict[str, Function] = {
    "grad": grad(sine),
    "vmap of grad": vmap(grad(sine)),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,))[1],
    "vjp": pulled_back,
    "jacrev": jacrev(torch.sin),
    "jacfwd": jacfwd(torch.sin),
    "hessian": hessian(sine),
}
CONTEXTS = (
    in_no_grad,
    with_grad_mode_set,
    in_inference_mode,
    in_autocast,
    in_sdpa_kernel,
    in_sdpa_kernels_by_priority,
    deterministic,
    in_another_dtype,
    in_matmul_precision,
    without_saved_tensor_hooks,
    without_forward_gradients,
    in_a_dual_level,
    without_torch_functions,
    with_grad_mode_set_in_vmap,
    with_random_numbers,
    checkpointed,
)
FUNCTIONS: dict[str, Function] = TRANSFORMS | {function.__name__: function for function in CONTEXTS}
DRAWS = ("with_random_numbers",)
"""Functions for which Inductor draws other random numbers than eager mode."""


def outcome(function: Function) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return a function's result and gradient in its second call, and the state after it."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4).requires_grad_()
    function(x)
    y = function(x)
    if y.requires_grad:
        y.sum().backward()
    return y.detach(), x.grad, process_state()


@tiers.one_in(2)
@pytest.mark.parametrize(
    "inner_backend", ["aot_eager", "eager", pytest.param("inductor", marks=tiers.ALL)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_state_afterwards_is_that_of_eager_mode(name: str, inner_backend: str) -> None:
    function = FUNCTIONS[name]
    expected, expected_gradient, expected_state = outcome(function)
    before = process_state()
    options = {"inner_backend": inner_backend, "precision": "fp32"}
    result, gradient, state = outcome(torch.compile(function, backend="qsync", options=options))
    if inner_backend == "inductor":
        before["random numbers"] = expected_state["random numbers"] = state["random numbers"]
    assert {**state, "random numbers": None} == {**before, "random numbers": None}
    assert state == expected_state
    if inner_backend != "inductor" or name not in DRAWS:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_checkpointing_works_after_a_compiled_gradient() -> None:
    torch.compile(grad(sine), backend="qsync", options={"inner_backend": "aot_eager"})(
        torch.randn(4)
    )
    x = torch.randn(4, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_attention_backend_of_the_model_is_preserved() -> None:
    expected = in_sdpa_kernel(x := torch.randn(2, 2, 4, 4))
    for inner_backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(
            in_sdpa_kernel,
            backend="qsync",
            options={"inner_backend": inner_backend, "precision": "fp32"},
        )
        assert torch.equal(compiled(x), expected)


_log: list[str] = []


@torch._dynamo.allow_in_graph
def enter() -> None:
    _log.append("enter")


@torch._dynamo.allow_in_graph
def leave() -> None:
    _log.append("leave")


def test_calls_with_an_effect_that_no_table_lists_stay_in_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        enter()
        y = x.sin()
        leave()
        return y + 1

    compiled = torch.compile(function, backend="qsync", options={"inner_backend": "eager"})
    compiled(torch.ones(4))
    _log.clear()
    compiled(torch.ones(4))
    assert _log == ["enter", "leave"]


def test_switches_of_a_body_that_cannot_be_traced_do_not_outlast_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qsync_fx.passes.tracing import retrace

    keep = retrace._Builder.keep

    def failing(builder: Any, node: fx.Node, leveled: bool = False) -> None:
        keep(builder, node, leveled)
        if node.target is torch.set_default_dtype:  # the body's first switch
            raise RuntimeError("the body cannot be traced")

    monkeypatch.setattr(retrace._Builder, "keep", failing)

    def body(y: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        z = y * 2
        torch.set_default_dtype(torch.float32)
        return z

    def function(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(body, x, use_reentrant=False)
        return y + torch.ones(4)

    x = torch.randn(4, requires_grad=True)
    assert (
        torch.compile(function, backend="qsync", options={"inner_backend": "eager"})(x).dtype
        is torch.float32
    )


@pytest.mark.parametrize("inner_backend", ["eager", "aot_eager"])
def test_opaque_call_is_unpacked_as_by_dynamo(inner_backend: str) -> None:
    """`vjp` calls its pullback after its functorch level ends. The call cannot be re-traced and
    returns a tuple.
    """

    def function(x: Tensor, y: Tensor) -> Tensor:
        result, pull = vjp(torch.mul, x, y)
        first, second = pull(result.cos())
        return first * 2 + second

    operands = torch.randn(4), torch.randn(4)
    compiled = torch.compile(
        function, backend="qsync", options={"inner_backend": inner_backend, "precision": "fp32"}
    )
    torch.testing.assert_close(compiled(*operands), function(*operands))
