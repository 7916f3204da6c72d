"""Whole models on a GPU: training close to FP32, agreement with the CPU, compilers, GradScaler and
CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_fx.backend.cuda.runtime import launch_utils
from tests.gpu import kit, models
from tests.support.models.small_models import Perceptron, gradients, relative_error

GRADIENTS = {
    "bert": {"bf16": 0.012, "fp16": 0.012, "int8": 0.045, "int8_grad": 0.055, "fp8": 0.17},
    # Batch norms over few pixels divide by small variances, which amplifies roundings tenfold.
    "resnet": {"bf16": 0.35, "fp16": 0.2, "int8": 0.75, "int8_grad": 0.75, "fp8": 1.1},
}
"""Relative error of weight gradients against FP32: 1.5 times the error measured with the same
models on a CPU.
"""

PROGRESS = 0.02
"""Difference of the final loss from FP32's, relative to FP32's progress; at most 0.003 on a CPU."""

STEPS = 25


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    """Disable TF32 for the FP32 reference, and reset compiled code."""
    torch.compiler.reset()
    launch_utils.forget()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def compiled(
    model: nn.Module, precision: str, inner_backend: str = "aot_eager", **options: Any
) -> Any:
    return torch.compile(
        model,
        backend="qsync",
        options={
            "precision": precision,
            "inner_backend": inner_backend,
            "skip_unprofitable": False,
            **options,
        },
    )


def trained(name: str, model: Any, parameters: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-3)
    x, losses = models.CASES[name].inputs().to(kit.DEVICE), []
    for _ in range(STEPS):
        losses.append(float(models.step(name, model, x)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize(
    ("precision", "inner_backend"),
    [
        ("bf16", "inductor"),
        ("fp16", "aot_eager"),
        ("int8", "aot_eager"),
        ("int8", "inductor"),
        ("int8_grad", "inductor"),
        ("fp8", "inductor"),
    ],
)
def test_a_model_trains_by_kernels_as_fp32_does(
    name: str, precision: str, inner_backend: str, tmp_path: Path
) -> None:
    if why := kit.lacks(precision):
        pytest.skip(why)
    problems = models.problems(name, precision, kit.arch())
    exact, model = models.build(name, kit.DEVICE), models.build(name, kit.DEVICE)
    x = models.CASES[name].inputs().to(kit.DEVICE)
    with models.kernels_win(problems, kit.arch(), tmp_path):
        fast = compiled(model, precision, inner_backend)
        models.step(name, exact, x)
        models.step(name, fast, x)
        assert (
            relative_error(models.weight_gradients(model), models.weight_gradients(exact))
            < GRADIENTS[name][precision]
        )
        if precision.startswith("int8"):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                models.step(name, fast, x)
            called = {event.key for event in profile.key_averages()}
            assert models.operators_with_kernels(problems, kit.arch()) <= called, (
                "every operator with a suitable kernel runs"
            )
        refused = {
            p: why
            for p, why in launch_utils.reasons().items()
            if "its kernel does not" in why or "cannot be st" in why
        }
        assert not refused, refused
        for module in (exact, model):
            module.zero_grad()
        losses, wanted = trained(name, fast, model), trained(name, exact, exact)
    progress = wanted[0] - wanted[-1]
    assert progress > 0.2 * wanted[0]
    assert abs(losses[-1] - wanted[-1]) < PROGRESS * progress


@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.parametrize("precision", kit.each_of("bf16", "int8", "int8_grad", "fp8"))
def test_cpu_and_gpu_agree(name: str, precision: str, tmp_path: Path) -> None:
    """With nearest rounding, both compute the same model in the same formats and differ only in the
    order of FP32 sums.

    A few sums near a rounding boundary are rounded to the other level.
    """
    problems = models.problems(name, precision, kit.arch())
    with models.kernels_win(problems, kit.arch(), tmp_path):
        results = []
        for device in (kit.DEVICE, torch.device("cpu")):
            model = models.build(name, device)
            loss = models.step(
                name,
                compiled(model, precision, rounding="nearest"),
                models.CASES[name].inputs().to(device),
            )
            results.append(
                (
                    float(loss),
                    {key: value.cpu() for key, value in models.weight_gradients(model).items()},
                )
            )
    (gpu, gpu_gradients), (cpu, cpu_gradients) = results
    assert abs(gpu - cpu) < 0.01 * abs(cpu)
    assert relative_error(gpu_gradients, cpu_gradients) < GRADIENTS[name][precision]


def test_the_seed_repeats_a_step(tmp_path: Path) -> None:
    """Stochastic rounding draws from torch's generator: equal seeds give equal bits."""
    with models.kernels_win(models.problems("resnet", "int8", kit.arch()), kit.arch(), tmp_path):
        model = models.build("resnet", kit.DEVICE)
        fast, x = compiled(model, "int8"), models.CASES["resnet"].inputs().to(kit.DEVICE)
        outputs = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            outputs.append(fast(x).logits.detach())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("scale", [2.0**10, 2.0**120])
def test_grad_scaler_in_fp16(scale: float) -> None:
    """With a scale that fits, a step equals the unscaled one. With a scale that overflows, the step
    is skipped and the scale decreases.
    """
    model = Perceptron().to(kit.DEVICE)
    plain = copy.deepcopy(model)
    fast = compiled(model, "fp16")
    x = torch.randn(64, 16, device=kit.DEVICE)
    scaler = torch.amp.GradScaler("cuda", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(fast(x).float().square().mean()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    if scale > 2.0**100:
        assert scaler.get_scale() < scale
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        return
    assert scaler.get_scale() == scale
    plain(x).square().mean().backward()
    wanted = gradients(plain)
    actual = {
        key: (before[key] - value) / 0.1
        for key, value in model.state_dict().items()
        if key in wanted
    }
    assert relative_error(actual, wanted) < 0.05


def _warmed_up(fast: Any, name: str, x: Tensor) -> None:
    """Run some steps on a side stream, as CUDA graph capture requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            models.step(name, fast, x)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_step_is_captured_in_a_cuda_graph(
    inner_backend: str, rounding: str, tmp_path: Path
) -> None:
    name = "bert"
    with models.kernels_win(models.problems(name, "int8", kit.arch()), kit.arch(), tmp_path):
        model = models.build(name, kit.DEVICE)
        fast = compiled(model, "int8", inner_backend, rounding=rounding)
        x = models.CASES[name].inputs().to(kit.DEVICE)
        _warmed_up(fast, name, x)
        graph = torch.cuda.CUDAGraph()
        model.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = models.step(name, fast, x)
        parameters = dict(model.named_parameters())
        replays = []
        for _ in range(2):
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            graph.replay()
            torch.cuda.synchronize()
            replays.append((float(loss), gradients(model)))
        late = [
            why
            for why in launch_utils.reasons().values()
            if "before CUDA graph capture began" in why
        ]
        assert not late, late
        model.zero_grad(set_to_none=True)
        wanted = float(models.step(name, fast, x)), gradients(model)
    if rounding == "nearest":
        assert replays[0][0] == pytest.approx(wanted[0], rel=1e-5)
        assert relative_error(replays[1][1], wanted[1]) < 1e-3
    else:
        assert replays[0][0] != replays[1][0], (
            "random numbers of the rounding advance between replays"
        )
        assert replays[0][0] == pytest.approx(replays[1][0], rel=0.05)
