"""Benchmark models: published architectures, sized to train in seconds on two CPU cores.

Weights and data are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Callable[..., Any]], Tensor]


@dataclass(frozen=True)
class Case:
    """Model and loss of one training step.

    Attributes:
        build: creates the model with the given attention implementation, "sdpa" or "eager".
        loss: runs the forward pass on fixed inputs and returns the loss.
        attention: whether the model has attention, so that `build` depends on its argument.
    """

    build: Callable[[str], nn.Module]
    loss: Loss
    attention: bool

    def attentions(self) -> dict[str, str]:
        """Return the suffix of a variant's name, by attention implementation."""
        if self.attention:
            return {"sdpa": " fused", "eager": " math"}
        return {"sdpa": ""}


class Step(nn.Module):
    """Model together with its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss = case.build("sdpa"), case.loss

    def forward(self) -> Tensor:
        result: Tensor = self.loss(self.model)
        return result


def bert(layers: int = 4, batch: int = 12, length: int = 128) -> Case:
    from transformers import BertConfig, BertModel

    ids = torch.randint(30000, (batch, length))
    target = torch.randn(batch, length, 768)

    def build(attention: str) -> nn.Module:
        model: nn.Module = BertModel(
            BertConfig(num_hidden_layers=layers, attn_implementation=attention)
        )
        return model

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.mse_loss(model(ids).last_hidden_state.float(), target)

    return Case(build, loss, attention=True)


def perceptron(batch: int = 8, widths: tuple[int, ...] = (64, 64, 16)) -> Case:
    """Return linear layers with GELU between them; the default size serves for quick runs."""
    x, target = torch.randn(batch, widths[0]), torch.randn(batch, widths[-1])

    def build(attention: str) -> nn.Module:
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
        return nn.Sequential(*layers[:-1])

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.mse_loss(model(x).float(), target)

    return Case(build, loss, attention=False)


def encoder_layer(width: int, batch: int = 8, length: int = 64, dropout: float = 0.0) -> Case:
    """Return a small `nn.TransformerEncoderLayer` with four heads.

    With dropout, most of its time is torch's random number generation.
    """
    x, target = torch.randn(batch, length, width), torch.randn(batch, length, width)

    def build(attention: str) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True)

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.mse_loss(model(x).float(), target)

    return Case(build, loss, attention=False)


def gpt2_block(batch: int = 4, length: int = 256) -> Case:
    from transformers import GPT2Config, GPT2Model

    states = torch.randn(batch, length, 768)
    target = torch.randn(batch, length, 768)

    def build(attention: str) -> nn.Module:
        # The token embedding is not part of the block: a vocabulary of one makes its cost
        # negligible.
        model: nn.Module = GPT2Model(
            GPT2Config(n_layer=1, vocab_size=1, attn_implementation=attention)
        )
        return model

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.mse_loss(model(inputs_embeds=states).last_hidden_state.float(), target)

    return Case(build, loss, attention=True)


def gpt2(layers: int = 12, batch: int = 8, length: int = 512) -> Case:
    from transformers import GPT2Config, GPT2Model

    ids = torch.randint(50000, (batch, length))
    target = torch.randn(batch, length, 768)

    def build(attention: str) -> nn.Module:
        model: nn.Module = GPT2Model(GPT2Config(n_layer=layers, attn_implementation=attention))
        return model

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.mse_loss(model(ids).last_hidden_state.float(), target)

    return Case(build, loss, attention=True)


def vit(layers: int = 2, batch: int = 8, size: int = 224) -> Case:
    """Return a ViT with the widths of ViT-Base and patches of 16 x 16."""
    from transformers import ViTConfig, ViTForImageClassification

    def build(attention: str) -> nn.Module:
        config = ViTConfig(
            num_hidden_layers=layers, image_size=size, num_labels=100, attn_implementation=attention
        )
        model: nn.Module = ViTForImageClassification(config)
        return model

    return replace(
        _classifier(build, batch, size, lambda model, images: model(images).logits), attention=True
    )


def resnet(
    depths: tuple[int, ...] = (2, 2, 2, 2), kind: str = "basic", batch: int = 16, size: int = 96
) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = {"basic": [64, 128, 256, 512], "bottleneck": [256, 512, 1024, 2048]}[kind]

    def build(attention: str) -> nn.Module:
        config = ResNetConfig(
            depths=list(depths), hidden_sizes=widths, layer_type=kind, num_labels=100
        )
        model: nn.Module = ResNetForImageClassification(config)
        return model

    return _classifier(build, batch, size, lambda model, images: model(images).logits)


def vgg_layers(*widths: int, channels: int = 3, batch_norm: bool = True) -> list[nn.Module]:
    """Return the layers of a VGG by their output channels; 0 is max pooling."""
    layers: list[nn.Module] = []
    for width in widths:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(channels, width, 3, padding=1))
        layers += [nn.BatchNorm2d(width)] if batch_norm else []
        layers.append(nn.ReLU(inplace=True))
        channels = width
    return layers


def initialize_convolutions(model: nn.Module) -> None:
    """Initialize the kernels of convolutions as He et al., as torchvision's VGGs do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def vgg16_bn(batch: int = 16, size: int = 64) -> Case:
    """Return VGG-16 with batch norm (Simonyan and Zisserman, D) and one linear layer."""

    def build(attention: str) -> nn.Module:
        layers = vgg_layers(
            64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0
        )
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))

    return _classifier(build, batch, size, lambda model, images: model(images))


def small_cnn(batch: int = 32, size: int = 28) -> Case:
    """Return a CNN with two convolutions and two linear layers."""

    def build(attention: str) -> nn.Module:
        features = (
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        return nn.Sequential(
            *features, nn.Linear(64 * (size // 2 - 2) ** 2, 128), nn.ReLU(), nn.Linear(128, 100)
        )

    return _classifier(build, batch, size, lambda model, images: model(images))


def convnext(batch: int = 8, size: int = 64) -> Case:
    """Return ConvNeXt-Tiny with three stages of one block (7 x 7 depthwise, two linear layers)."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    def build(attention: str) -> nn.Module:
        config = ConvNextConfig(
            num_stages=3, depths=[1, 1, 1], hidden_sizes=[96, 192, 384], num_labels=100
        )
        model: nn.Module = ConvNextForImageClassification(config)
        return model

    return _classifier(build, batch, size, lambda model, images: model(images).logits)


def mobilenet(batch: int = 8, size: int = 64) -> Case:
    """Return MobileNetV2 (Sandler et al.): 3 x 3 depthwise between 1 x 1 convolutions."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    def build(attention: str) -> nn.Module:
        model: nn.Module = MobileNetV2ForImageClassification(
            MobileNetV2Config(num_labels=100, tf_padding=False)
        )
        return model

    return _classifier(build, batch, size, lambda model, images: model(images).logits)


def _classifier(
    build: Callable[[str], nn.Module],
    batch: int,
    size: int,
    logits: Callable[[Callable[..., Any], Tensor], Tensor],
) -> Case:
    images, labels = torch.randn(batch, 3, size, size), torch.randint(100, (batch,))

    def loss(model: Callable[..., Any]) -> Tensor:
        return nn.functional.cross_entropy(logits(model, images).float(), labels)

    return Case(build, loss, attention=False)
