"""DDP buckets, compared with torch's Reducer from the second iteration on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.predictor import ddp_buckets
from tests.support import tiers

TYPES = (torch.float32, torch.float16, torch.float64)
LIMITS = st.sampled_from([(2**10, 2**14), (2**12,), (64, 2**12, 2**8)])


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Tensor], list[int]]:
    """Draw parameters with a single stored element, and the arrival order of their gradients."""
    count = draw(st.integers(1, 40))
    numels = draw(st.lists(st.integers(0, 2**13), min_size=count, max_size=count))
    types = draw(st.lists(st.sampled_from(TYPES), min_size=count, max_size=count))
    parameters = [
        torch.empty(1, dtype=dtype).expand(numel)
        for numel, dtype in zip(numels, types, strict=True)
    ]
    return parameters, draw(st.permutations(range(count)))


def arguments(parameters: list[Tensor]) -> dict[str, Any]:
    return {
        "numels": [parameter.numel() for parameter in parameters],
        "dtype_bytes": [parameter.element_size() for parameter in parameters],
    }


@settings(max_examples=60, deadline=None)
@given(models(), LIMITS)
def test_as_torch_assigns_them(
    model: tuple[list[Tensor], list[int]], limits: tuple[int, ...]
) -> None:
    parameters, arrival = model
    arrived = [parameters[index] for index in arrival]
    sparse = [False] * len(arrived)
    torchs, _ = dist._compute_bucket_assignment_by_size(arrived, limits, sparse, arrival)
    assert ddp_buckets(**arguments(parameters), arrival=arrival, limits=limits) == torchs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Twisted(nn.Module):
    """A model whose layers run in another order than they are registered; one is in FP16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(width, 1), nn.Linear(width, width)
        self.narrow = nn.Linear(width, width).half()
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.bilinear = nn.Bilinear(32, 32, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.narrow(x.half()).float()
        for layer in reversed(self.middle):
            x = torch.relu(layer(x))
        return self.last(x + self.bilinear(x[..., :32], x[..., :32]))


def networks() -> Iterator[tuple[nn.Module, Tensor]]:
    import transformers as hf

    yield Twisted(768), torch.randn(2, 768)
    yield nn.Sequential(*(nn.Linear(256, 256) for _ in range(9))), torch.randn(2, 256)
    bert = hf.BertConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=1024, num_attention_heads=4
    )
    yield hf.BertForSequenceClassification(bert), torch.randint(1000, (2, 8))
    resnet = hf.ResNetConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512], layer_type="basic"
    )
    yield hf.ResNetForImageClassification(resnet), torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize(
    ("network_index", "cap"),
    [
        (0, None),
        (0, 2),
        (1, None),
        *(pytest.param(index, None, marks=tiers.ALL) for index in (2, 3)),
    ],
)
@pytest.mark.usefixtures("alone")
def test_as_a_real_run_of_ddp_logs_them(network_index: int, cap: int | None) -> None:
    model, x = list(networks())[network_index]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = arguments(parameters)
    # The Reducer marks a gradient as ready when it has been accumulated.
    arrival: list[int] = []
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrival.append(index))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
    limits = {} if cap is None else {"limits": (cap * 2**20,)}

    def logged(name: str) -> list[list[int]]:
        text = wrapped._get_ddp_logging_data()[name]
        return [
            [int(index) for index in bucket.split()]
            for bucket in text.replace(",", ", ").split(", ")
        ]

    for _ in range(2):
        arrival.clear()
        out = wrapped(x)
        getattr(out, "logits", out).float().sum().backward()
    wrapped(x)
    torchs = logged("rebuilt_per_bucket_param_indices")
    assert len(torchs) > 1
    assert ddp_buckets(**sizes, arrival=arrival, **limits) == torchs


def vgg16() -> nn.Module:
    """Return VGG-16 (Simonyan and Zisserman, configuration D), as in torchvision."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        layers.append(nn.Conv2d(before, width, 3))
        before = width
    return nn.Sequential(
        *layers, nn.Linear(25088, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)
    )


def resnet50() -> nn.Module:
    """Return ResNet-50 (He et al.), with parameters in the order of torchvision."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False), nn.BatchNorm2d(64)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(blocks):
            sides = [
                (before, width, 1),
                (width, width, 3),
                (width, 4 * width, 1),
                *([(before, 4 * width, 1)] * (index == 0)),
            ]
            for in_channels, out_channels, side in sides:
                layers += [
                    nn.Conv2d(in_channels, out_channels, side, bias=False),
                    nn.BatchNorm2d(out_channels),
                ]
            before = 4 * width
    return nn.Sequential(*layers, nn.Linear(2048, 1000))


def test_sizes_that_others_published() -> None:
    """Numbers of elements of each bucket.

    BERT-base and VGG-16 on two T4: QSync's public code (MIT), qsync/Predictor/config.py. ResNet-50
    on two A100: all-reduces in a trace of Holistic Trace Analysis (MIT).
    """
    import transformers as hf

    published = {
        "bert": [2363138, *[7087872] * 11, 28563456],
        "vgg16": [4097000, 16781312, 102764544, 7079424, 7079936, 555328],
        "resnet50": [2049000, 7875584, 6563840, 6637568, 2431040],
    }
    with torch.device("meta"):
        models = {
            "bert": hf.BertForQuestionAnswering(hf.BertConfig()),
            "vgg16": vgg16(),
            "resnet50": resnet50(),
        }
    for name, model in models.items():
        numels = [parameter.numel() for parameter in model.parameters()]
        assert [
            sum(numels[index] for index in bucket) for bucket in ddp_buckets(numels)
        ] == published[name]
