"""Models and steps of `smoke.py`: a small BERT and a small ResNet in plain torch, so that no other
package is needed.

Invariant: all variants begin with the same weights and data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 3
ROUNDS = 12


class Bert(nn.Module):
    """Transformer encoder over tokens, with a head."""

    def __init__(self, width: int = 256, layers: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(tokens)).mean(1))
        return logits


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.short(x))


def resnet(widths: Sequence[int] = (64, 64, 128, 256)) -> nn.Module:
    blocks = [Block(a, b, 1 + (a != b)) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 16)
    )


def case(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, its inputs and its labels."""
    torch.manual_seed(0)
    small = device.type == "cpu"
    if name == "bert":
        model: nn.Module = Bert(64, 1) if small else Bert()
        x = torch.randint(1000, (4, 16) if small else (32, 128))
    else:
        model, x = (
            resnet((16, 32)) if small else resnet(),
            torch.randn(2 if small else 64, 3, 32, 32),
        )
    return model.to(device).train(), x.to(device), (torch.arange(len(x)) % 16).to(device)


def steps(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    count: int,
    fp16: bool = False,
    scaled: bool = False,
) -> list[float]:
    """Train and return the losses. `fp16`: under autocast. `scaled`: with a GradScaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(x.device.type, enabled=scaled)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        context: Any = (
            torch.autocast(x.device.type, torch.float16) if fp16 else contextlib.nullcontext()
        )
        with context:
            loss = F.cross_entropy(run(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def trained(device: torch.device) -> dict[str, Any]:
    """Train both models in INT8; raise AssertionError if losses differ from FP32's or, before
    Ampere, no product ran as a kernel.
    """
    report: dict[str, Any] = {}
    for name in ("bert", "resnet"):
        model, x, y = case(name, device)
        want = steps(model, model, x, y, STEPS)
        # On a CPU only this script is tested.
        for inner in ("aot_eager",) if device.type == "cpu" else ("aot_eager", "inductor"):
            torch.compiler.reset()
            print(f"smoke: {name}, {inner}", file=sys.stderr, flush=True)
            model, x, y = case(name, device)
            compiled = torch.compile(
                model,
                backend="qsync",
                options={"precision": "int8", "inner_backend": inner, "skip_unprofitable": False},
            )
            with (
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
                _warned() as messages,
            ):
                got = steps(model, compiled, x, y, STEPS, scaled=device.type == "cuda")
            ran = {
                event.name
                for event in profile.events()
                if event.name in ("qsync::gemm", "qsync::conv2d_product")
            }
            worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
            report[f"{name}, {inner}"] = {
                "losses": got,
                "fp32": want,
                "ours": sorted(ran),
                "warned": messages,
            }
            assert worst < 0.1 * max(want), (
                f"{name}, {inner}: losses {got} differ from FP32's {want}"
            )
            _check_ours(device, name, ran)
    return report


def _check_ours(device: torch.device, name: str, ran: set[str]) -> None:
    from qsync_fx.backend.cuda.runtime.device_state import known_of

    state = known_of(device)
    # Before Ampere INT8 is fastest for all sizes, so that its products are kernels without tuning.
    if device.type == "cuda" and state.arch == "sm_75" and state.lacks is None:
        assert "qsync::gemm" in ran, (
            f"{name}: no linear layer ran as qsync::gemm, only {sorted(ran)}"
        )


@contextlib.contextmanager
def _warned() -> Any:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if w.category.__module__.startswith("qsync_fx")]


def timed(device: torch.device) -> dict[str, Any]:
    """Return the median milliseconds of a step by wall clock, with interleaved variants, and on the
    device.
    """
    report: dict[str, Any] = {}
    inner = "aot_eager" if device.type == "cpu" else "inductor"
    for name in ("bert",) if device.type == "cpu" else ("bert", "resnet"):
        variants: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], bool]] = {}
        for variant in (
            "fp32",
            "autocast fp16",
            "autocast fp16, compiled",
            "qsync fp16",
            "qsync int8",
        ):
            model, x, y = case(name, device)
            run: Any = model
            if variant.startswith("qsync"):
                run = torch.compile(
                    model,
                    backend="qsync",
                    options={
                        "precision": variant.split()[1],
                        "inner_backend": inner,
                        "skip_unprofitable": False,
                    },
                )
            elif variant.endswith("compiled"):
                run = torch.compile(model, backend=inner)
            variants[variant] = model, run, variant.startswith("autocast")
        took: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
        for turn in range(ROUNDS if device.type == "cuda" else 3):
            for variant, (model, run, fp16) in variants.items():
                seconds = _once(device, functools.partial(steps, model, run, x, y, 1, fp16))
                if turn > 1:
                    took[variant].append(seconds)
        report[name] = {
            variant: dict(
                zip(
                    ("wall_ms", "device_ms"),
                    map(_milliseconds, zip(*values, strict=True)),
                    strict=True,
                )
            )
            for variant, values in took.items()
        }
    return report


def _milliseconds(seconds: tuple[float, ...]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def _once(device: torch.device, call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call by wall clock, and between two events on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (took := time.perf_counter() - start), took
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, begin.elapsed_time(end) / 1e3
