"""Models of torchvision and timm, as these packages build them, trained with Inductor in four
precisions and compared with eager torch.

Inputs are small, and models are shallow if the package has an option for it. Dropout and stochastic
depth are off, because the random numbers would differ.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from tests.support import tiers
from tests.support.computing.digit_training import ERRORS
from tests.support.models.small_models import gradients, relative_error

torch.set_num_threads(1)

CLASSES, STEPS = 10, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"precision": "bf16"},
    "int8": {"precision": "int8"},
    "int8_grad": {"precision": "int8_grad"},
}
AUTOCAST_ERRORS = {"default": 2.0, "bf16": 2.0, "int8": 8.0, "int8_grad": 8.0}
"""Bound on the error of all gradients of the first step together, in units of the error of eager
torch under BF16 autocast.

Batch norms over few values amplify roundings, so each model has its own bound. The bound of the
small models (`ERRORS`) is always allowed.
"""


@dataclass(frozen=True)
class Program:
    """A model of a package.

    Attributes:
        package: Python package.
        name: name of the model in the package.
        options: arguments of the function that builds it.
        size: height and width of an image, in pixels.
    """

    package: str
    name: str
    options: dict[str, Any]
    size: int

    def build(self) -> nn.Module:
        """Return the model in training mode, from a fixed seed, or skip the test."""
        package = installed(self.package)
        torch.manual_seed(0)
        if self.package == "timm":
            model: nn.Module = package.create_model(self.name, num_classes=CLASSES, **self.options)
        else:
            model = getattr(package.models, self.name)(num_classes=CLASSES, **self.options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif type(module).__name__ in ("StochasticDepth", "DropPath"):
                module.p = module.drop_prob = 0.0
        return model.train()


PROGRAMS = (
    Program("torchvision", "resnet18", {}, 64),
    Program("torchvision", "mobilenet_v3_small", {}, 64),
    Program("torchvision", "alexnet", {}, 64),
    Program("torchvision", "squeezenet1_1", {}, 64),
    Program(
        "torchvision",
        "VisionTransformer",
        {
            "image_size": 32,
            "patch_size": 8,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_dim": 64,
            "mlp_dim": 128,
        },
        32,
    ),
    Program("timm", "vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, 64),
    Program("timm", "convnext_atto", {"depths": (1, 1, 2, 1)}, 64),
    Program("timm", "edgenext_xx_small", {}, 64),
    Program("timm", "regnety_002", {}, 64),
    Program("timm", "swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1, 2, 1)}, 56),
)
FIRST = {("torchvision", "VisionTransformer"), ("timm", "vit_tiny_patch16_224")}
"""The programs that run in the tier "all"."""


def installed(name: str) -> Any:
    """Return a package, or skip the test with the reason that it cannot be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        # A build of torchvision for another torch, or for CUDA, raises RuntimeError.
        return pytest.skip(f"{name} is not usable: {error}")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(
    model: nn.Module, call: Callable[[Tensor], Any], size: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a few steps; return the loss of each, and the gradients of the first one."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, size, size, generator=generator)
    labels = torch.randint(CLASSES, (8,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        first = first or gradients(model)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", OPTIONS)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            id=f"{program.package}-{program.name}",
            marks=tiers.ALL if (program.package, program.name) in FIRST else tiers.EVERY,
        )
        for program in PROGRAMS
    ],
)
def test_trains_as_eager_does(program: Program, precision: str) -> None:
    exact = program.build()
    losses, expected = train(exact, exact, program.size)
    rounded = program.build()
    _, in_bf16 = train(
        rounded, torch.autocast("cpu", torch.bfloat16)(rounded.forward), program.size
    )
    model = program.build()
    compiled = torch.compile(model, backend="qsync", options=OPTIONS[precision])
    with warnings.catch_warnings():
        warnings.simplefilter("error", qsync_fx.PlanWarning)
        result, first = train(model, compiled, program.size)
    bound = AUTOCAST_ERRORS[precision] * relative_error(in_bf16, expected)
    assert relative_error(first, expected) < max(bound, ERRORS.get(precision, 0.0))
    assert result == pytest.approx(losses, rel=0.1)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    applied = qsync_fx.plan_coverage(compiled)
    assert applied.complete and applied.called, str(applied)
