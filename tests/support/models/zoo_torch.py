"""Small torch.nn models for `zoo`: convolutional, recurrent, attention and functional."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Inputs = dict[str, Tensor]
VOCABULARY = 67
TOKENS = 9


def tokens(batch: int = 3, length: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        result: Tensor = self.relu(out)
        return result


def resnet() -> tuple[nn.Module, Inputs]:
    stem = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return _Classifier(nn.Sequential(stem, Residual(8, 8, 1), Residual(8, 16, 2), head)), _images(
        33
    )


def vgg() -> tuple[nn.Module, Inputs]:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2, 2),
        ]

    head = [
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.ReLU(True),
        nn.Dropout(0.0),
        nn.Linear(24, 5),
    ]
    return _Classifier(nn.Sequential(*block(3, 8), *block(8, 16), *head)), _images(16)


def _images(size: int) -> Inputs:
    return {"x": torch.randn(6, 3, size, size), "labels": torch.randint(5, (6,))}


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), labels)


class UNet(nn.Module):
    """U-Net with a transposed convolution, a skip connection, group norm and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.LeakyReLU(0.1)
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 8, 3, padding=1, groups=2)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = self.first(x)
        up = self.up(self.down(first))
        y = F.gelu(self.last(torch.cat([first, up], dim=1)))
        return F.cross_entropy(self.head(F.interpolate(y, scale_factor=2, mode="bilinear")), labels)


def unet() -> tuple[nn.Module, Inputs]:
    return UNet(), {"x": torch.randn(2, 3, 12, 12), "labels": torch.randint(4, (2, 24, 24))}


class Signals(nn.Module):
    """Model of 1D and 3D convolutions, also transposed, with various norms and paddings."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(
            nn.Conv1d(2, 8, 5, padding=2, padding_mode="circular"),
            nn.InstanceNorm1d(8, affine=True), nn.PReLU(8),
            nn.Conv1d(8, 8, 3, dilation=2, groups=8), nn.ELU(),
            nn.ConvTranspose1d(8, 4, 4, stride=2), nn.AvgPool1d(3),
        )  # fmt: skip
        self.space = nn.Sequential(
            nn.Conv3d(1, 6, 3, padding="same"), nn.BatchNorm3d(6), nn.Softplus(), nn.MaxPool3d(2),
            nn.ConvTranspose3d(6, 4, 2, stride=2, bias=False), nn.Hardswish(),
        )  # fmt: skip
        self.mix = nn.Bilinear(4, 4, 6)

    def forward(self, line: Tensor, space: Tensor) -> Tensor:
        first, second = self.line(line).mean(-1), self.space(space).mean((2, 3, 4))
        mixed: Tensor = self.mix(first.float(), second.float())
        return mixed


def signals() -> tuple[nn.Module, Inputs]:
    return Signals(), {"line": torch.randn(3, 2, 17), "space": torch.randn(3, 1, 4, 6, 5)}


class Transformer(nn.Module):
    """Transformer encoder of torch.nn, whose embedding and head share their weight."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, 32)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=first)
            for first in (True, False)
        )
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, None, mask, use_reentrant=False)
            else:
                x = layer(x, src_key_padding_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def transformer(checkpointed: bool = False) -> tuple[nn.Module, Inputs]:
    mask = torch.zeros(3, TOKENS, dtype=torch.bool)
    mask[1, -2:] = True
    return Transformer(checkpointed), {"ids": tokens(), "labels": tokens(), "mask": mask}


class Recurrent(nn.Module):
    """LSTM and GRU, which stay in FP32, between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 12, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(24, 12, num_layers=2)
        self.head = nn.Linear(12, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm(self.embedding(ids))
        y, _ = self.gru(x.transpose(0, 1))
        out: Tensor = self.head(y[-1] + hidden[0])
        return out


def recurrent() -> tuple[nn.Module, Inputs]:
    return Recurrent(), {"ids": tokens()}


class Perceptron(nn.Module):
    """Mixture of experts with functional products, einsum and in-place operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(20, 24) / 5)
        self.bias = nn.Parameter(torch.randn(24))
        self.experts = nn.Parameter(torch.randn(3, 24, 16) / 5)
        self.gate = nn.Linear(24, 3)
        self.norm = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x, self.first)
        h.clamp_(min=-1.0).mul_(1.5)
        h[:, ::2] += 0.25
        weights = self.gate(h).softmax(-1)
        mixed: Tensor = torch.einsum("be,eio,bi->bo", weights, self.experts, h)
        return self.norm(mixed) @ mixed.t()


def perceptron() -> tuple[nn.Module, Inputs]:
    return Perceptron(), {"x": torch.randn(7, 20)}
