"""Autocast policy against torch.autocast: bit-exact on the CPU, dtypes on CUDA (fake tensors)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from qsync_fx.autocast_policy import _COMPOSED, _LOWER, _PROMOTE, policy
from tests.support import tiers
from tests.support.computing.operator_samples import Call, calls

aten = torch.ops.aten
Place = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
INPUTS = ("fp32", "lower", "mixed")

# Reflection and replication padding have an FP32 kernel, constant padding has none: the arguments
# decide.
BY_ARGUMENT = frozenset({"aten::pad"})
# Uninitialized results differ from run to run.
UNWRITTEN = re.compile("empty|resize")


def autocasts(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def copied(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype, copy=True)


def fake_on_cuda(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(value.shape, dtype=dtype, device="cuda")


def with_inputs(call: Call, inputs: str, lower: torch.dtype, place: Place) -> Call:
    """Return the call with FP32, lower-precision, or alternating lower-precision and FP32
    arguments.
    """
    count = 0

    def convert(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor):
            return value
        count += autocasts(value)
        lowered = autocasts(value) and (inputs == "lower" or (inputs == "mixed" and count % 2 == 1))
        return place(value, lower if lowered else value.dtype)

    args, kwargs = tree_map(convert, (call.args, call.kwargs))
    return Call(call.target, args, kwargs)


def run(call: Call) -> list[torch.Tensor]:
    torch.manual_seed(0)
    result = call.target(*call.args, **call.kwargs)
    return [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]


def run_by_policy(call: Call, device: str, lower: torch.dtype) -> list[torch.Tensor]:
    """Convert the arguments by the policy, and run outside of autocast."""
    rule = policy(call.target, device)
    present = {value.dtype for value in tree_leaves((call.args, call.kwargs)) if autocasts(value)}
    widest = torch.float32 if torch.float32 in present else lower
    dtype = {"lower": lower, "fp32": torch.float32, "promote": widest, None: None}[rule]
    if dtype is None:
        return run(call)
    args, kwargs = tree_map(
        lambda value: value.to(dtype) if autocasts(value) else value, (call.args, call.kwargs)
    )
    return run(Call(call.target, args, kwargs))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.layout is not torch.strided or first.is_complex():
        return True
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(), second.nan_to_num()
    )


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Operators outside of the operator database.
EXTRA = (
    Call(aten.conv_tbc.default, (t(7, 2, 3), t(3, 3, 5), t(5)), {}),
    Call(aten._addmm_activation.default, (t(4), t(3, 5), t(5, 4)), {}),
    Call(aten.chain_matmul.default, ([t(3, 4), t(4, 5), t(5, 2)],), {}),
    Call(aten.linalg_matmul.default, (t(3, 4), t(4, 5)), {}),
    Call(aten.einsum.default, ("bij,bjk,bk->bi", [t(2, 3, 4), t(2, 4, 5), t(2, 5)]), {}),
    Call(aten.conv2d.padding, (t(1, 2, 5, 5), t(3, 2, 3, 3), t(3), [1, 1], "same"), {}),
    Call(aten.conv1d.padding, (t(1, 2, 5), t(3, 2, 3), t(3), [1], "same"), {}),
    Call(
        aten.convolution.default, (t(1, 2, 5), t(3, 2, 3), t(3), [1], [0], [1], False, [0], 1), {}
    ),
    Call(
        aten._convolution.deprecated,
        (t(1, 2, 5), t(3, 2, 3), t(3), [1], [0], [1], False, [0], 1, False, False, True),
        {},
    ),
)
# Kernels that plain calls do not reach: of oneDNN, and of encoder layers in inference.
UNREACHED = frozenset({"aten::mkldnn_rnn_layer", "aten::_native_multi_head_attention"})


def may_change(target: torch._ops.OpOverload) -> bool:
    """Return whether autocast on the CPU has a kernel for an operator, or may have one for
    operators that it calls.
    """
    rule = policy(target, "cpu")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )
    return rule != "inside" and (rule is not None or composite)


@tiers.ALL
def test_cpu_policy_equals_autocast() -> None:
    wrong: set[str] = set()
    reached: set[str] = set()
    for call in (*calls(2), *EXTRA):
        name = call.target._schema.name
        if not may_change(call.target) or name in BY_ARGUMENT or UNWRITTEN.search(name):
            continue
        for inputs in INPUTS:
            # Two copies, since some operators write to their arguments.
            under, ours = (with_inputs(call, inputs, torch.bfloat16, copied) for _ in range(2))
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    expected = run(under)
            except (RuntimeError, NotImplementedError):
                continue  # Autocast itself cannot run these types.
            reached.add(name)
            try:
                actual = run_by_policy(ours, "cpu", torch.bfloat16)
            except (RuntimeError, NotImplementedError) as error:
                wrong.add(f"{call.target} {inputs}: {error}")
                continue
            if len(actual) != len(expected) or not all(map(same, actual, expected)):
                wrong.add(
                    f"{call.target} {inputs}: {[v.dtype for v in expected]}, by policy "
                    f"{[v.dtype for v in actual]}"
                )
    assert not wrong, "\n".join(sorted(wrong))
    declared = (
        _LOWER["cpu"] | _PROMOTE["cpu"] | _COMPOSED["cpu"]["lower"] | _COMPOSED["cpu"]["fp32"]
    )
    assert declared - reached == UNREACHED


def test_inside_policy_is_limited_to_unconvertible_operators() -> None:
    """An operator is "inside" only if each conversion of its arguments differs from autocast for
    some sample.
    """
    lower, modes = torch.bfloat16, ("lower", "fp32", None)
    cells = (
        Call(
            aten.lstm_cell.default,
            (t(2, 5), [t(2, 4), t(2, 4)], t(16, 5), t(16, 4), t(16), t(16)),
            {},
        ),
        Call(aten.gru_cell.default, (t(2, 5), t(2, 4), t(12, 5), t(12, 4), t(12), t(12)), {}),
        Call(aten.inner.default, (t(3, 4), t(5, 4)), {}),
        Call(aten.inner.default, (t(4), t(4)), {}),
        Call(aten.bilinear.default, (t(2, 3), t(2, 4), t(5, 3, 4), t(5)), {}),
        Call(aten.cov.default, (t(3, 5),), {}),
    )
    left = {(call.target, mode) for call in cells for mode in modes}
    for call in cells:
        assert policy(call.target, "cpu") == "inside"
        with torch.autocast("cpu", lower):
            expected = run(call)
        for mode in modes:
            to = {"lower": lower, "fp32": torch.float32, None: None}[mode]
            args = tree_map(
                lambda v, to=to: v.to(to) if to is not None and autocasts(v) else v, call.args
            )
            if not all(map(same, run(Call(call.target, args, {})), expected)):
                left.discard((call.target, mode))
    assert not left


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Enable autocast for CUDA, also without CUDA: fake tensors have its dispatch keys."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def cuda_calls() -> tuple[Call, ...]:
    """Return one call of each operator that CUDA autocast changes."""
    first: dict[torch._ops.OpOverload, Call] = {}
    for call in (*calls(2), *EXTRA):
        if policy(call.target, "cuda") not in (None, "inside"):
            first.setdefault(call.target, call)
    return tuple(first.values())


def test_cuda_policy_gives_the_types_that_autocast_gives() -> None:
    wrong: set[str] = set()
    reached: set[str] = set()
    for call in cuda_calls():
        for inputs in tiers.chosen(INPUTS[-1:], INPUTS):
            with FakeTensorMode():
                made = with_inputs(call, inputs, torch.float16, fake_on_cuda)
                try:
                    with cuda_autocast():
                        expected = [value.dtype for value in run(made)]
                except (RuntimeError, NotImplementedError):
                    continue  # Banned by autocast, or in need of a device.
                reached.add(call.target._schema.name)
                actual = [value.dtype for value in run_by_policy(made, "cuda", torch.float16)]
            if actual != expected:
                wrong.add(f"{call.target} {inputs}: {expected}, by policy {actual}")
    assert not wrong, "\n".join(sorted(wrong))
    assert {
        "aten::linear",
        "aten::conv1d",
        "aten::softmax",
        "aten::layer_norm",
        "aten::cross_entropy_loss",
    } <= reached


def test_cuda_lists_equal_the_header() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")

    def listed(macro: str) -> set[str]:
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None
        return {f"aten::{name}" for name in re.findall(r"_\((\w+)", body.group(1))}

    # cuDNN's convolutions are registered separately.
    unlisted = {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose"}
    assert _LOWER["cuda"] - unlisted == listed("AT_FORALL_LOWER_PRECISION_FP")
    assert _PROMOTE["cuda"] == listed("AT_FORALL_PROMOTE")
    for name in listed("AT_FORALL_FP32") | listed("AT_FORALL_FP32_SET_OPT_DTYPE"):
        packet = getattr(aten, name.removeprefix("aten::"))
        assert "fp32" in {
            policy(getattr(packet, overload), "cuda") for overload in packet.overloads()
        }, name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_operator_is_declared_twice(device: str) -> None:
    sets = [_LOWER[device], _PROMOTE[device], *_COMPOSED[device].values()]
    assert sum(map(len, sets)) == len(frozenset().union(*sets))
    for name in frozenset().union(*sets):
        packet = getattr(aten, name.removeprefix("aten::").partition(".")[0])
        assert any(
            policy(getattr(packet, overload), device) is not None for overload in packet.overloads()
        ), name


def test_other_devices_and_writes_into_out_are_left_alone() -> None:
    assert policy(aten.linear.default, "meta") is None
    assert policy(aten.linalg_matmul.default, "cpu") == "lower"
    assert policy(aten.linalg_matmul.out, "cpu") is None
    assert policy(aten.relu.default, "cpu") is None
    assert policy(aten.add.Tensor, "cuda") is None
