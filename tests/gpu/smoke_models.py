"""What `smoke.py` trains: a small BERT and a small ResNet in plain torch, so that no package is
needed.

Invariant: steps of all variants begin from the same weights and see the same data.
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
    """Four layers of an encoder over tokens, and a head."""

    def __init__(self, width: int = 256, layers: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.words(tokens)).mean(1))
        return found


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
    """Returns a model, its inputs and its labels."""
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
    """Trains and returns the losses. `fp16`: under autocast. `scaled`: by a GradScaler."""
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
    """Trains both models in INT8; raises where losses leave FP32's or a layer of a large product
    was not ours.
    """
    found: dict[str, Any] = {}
    for name in ("bert", "resnet"):
        model, x, y = case(name, device)
        want = steps(model, model, x, y, STEPS)
        # On a CPU it is this script that is tried.
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
                _warned() as told,
            ):
                got = steps(model, compiled, x, y, STEPS, scaled=device.type == "cuda")
            ran = {
                event.name
                for event in profile.events()
                if event.name in ("qsync::gemm", "qsync::conv2d_product")
            }
            worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
            found[f"{name}, {inner}"] = {
                "losses": got,
                "fp32": want,
                "ours": sorted(ran),
                "warned": told,
            }
            assert worst < 0.1 * max(want), f"{name}, {inner}: losses {got} and FP32's {want}"
            _check_ours(device, name, ran)
    return found


def _check_ours(device: torch.device, name: str, ran: set[str]) -> None:
    from qsync_fx.backend.cuda.runtime.device_state import known_of

    known = known_of(device)
    # Before Ampere nothing is faster than INT8, whatever the size, so its products are kernels
    # without tuning.
    if device.type == "cuda" and known.arch == "sm_75" and known.lacks is None:
        assert "qsync::gemm" in ran, f"{name}: no product was a kernel of ours, of {sorted(ran)}"


@contextlib.contextmanager
def _warned() -> Any:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in told if w.category.__module__.startswith("qsync_fx")]


def timed(device: torch.device) -> dict[str, Any]:
    """Returns the median seconds of a step by wall-clock, variants taking turns, and of its kernels
    on the device.
    """
    found: dict[str, Any] = {}
    inner = "aot_eager" if device.type == "cpu" else "inductor"
    for name in ("bert",) if device.type == "cpu" else ("bert", "resnet"):
        ways: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], bool]] = {}
        for way in ("fp32", "autocast fp16", "autocast fp16, compiled", "qsync fp16", "qsync int8"):
            model, x, y = case(name, device)
            run: Any = model
            if way.startswith("qsync"):
                run = torch.compile(
                    model,
                    backend="qsync",
                    options={
                        "precision": way.split()[1],
                        "inner_backend": inner,
                        "skip_unprofitable": False,
                    },
                )
            elif way.endswith("compiled"):
                run = torch.compile(model, backend=inner)
            ways[way] = model, run, way.startswith("autocast")
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(ROUNDS if device.type == "cuda" else 3):
            for way, (model, run, fp16) in ways.items():
                one = _once(device, functools.partial(steps, model, run, x, y, 1, fp16))
                if turn > 1:
                    took[way].append(one)
        found[name] = {
            way: dict(
                zip(
                    ("wall_ms", "device_ms"),
                    map(_milliseconds, zip(*values, strict=True)),
                    strict=True,
                )
            )
            for way, values in took.items()
        }
    return found


def _milliseconds(seconds: tuple[float, ...]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def _once(device: torch.device, call: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of a call by wall-clock, and between two events on the device."""
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
