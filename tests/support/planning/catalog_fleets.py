"""Problems of V100 in FP32 and planned T4 that train small configurations of real models."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx.allocator import DeviceClass, Problem
from qsync_fx.devices import get
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.memory import MOMENTUM, TrainingMemory
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network
from qsync_fx.profiler.model_graph_builder import build_model_graph
from tests.support.planning.allocation_problems import drawn_sensitivity

FORMATS = {"v100": ("fp32", "fp16"), "t4": ("fp32", "fp16", "int8")}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000,
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    ids = torch.arange(4 * 64).view(4, 64)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=[2, 2], hidden_sizes=[64, 128], embedding_size=32, layer_type="basic", num_labels=10
    )  # type: ignore[call-arg]
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.arange(4),
    }


def perceptron() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), {
        "input": torch.randn(4, 1024)
    }


MODELS: dict[str, Any] = {"perceptron": perceptron, "bert": bert, "resnet": resnet}


@functools.cache
def symbolic(name: str, device: str) -> ModelGraph:
    """Return the graph of a model for a device, with a symbolic batch size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 0)
    return build_model_graph(
        qsync_fx.explain(model.train(), **inputs, options={"target": device}), FORMATS[device]
    )


def sized(name: str, device: str, batch: int) -> DeviceClass:
    """Return a device class that trains a model with a local batch size."""
    graph = symbolic(name, device)
    (symbol,) = graph.symbols
    graph = graph.at(**{symbol: batch})
    return DeviceClass(
        graph,
        DeviceTimes(get(device), graph),
        drawn_sensitivity(graph),
        FORMATS[device],
        training=TrainingMemory(MOMENTUM, True),
    )


def of_catalog(name: str, batch: int = 32, count: int = 2, bandwidth: float = 1.25e10) -> Problem:
    """Return a problem with `count` V100 in FP32 and `count` T4."""
    classes = {device: sized(name, device, batch) for device in FORMATS}
    classes["v100"] = replace(classes["v100"], fixed_plan=classes["v100"].uniform("fp32"))
    devices = {device: ClusterDevice(count=count, device=device, batch=batch) for device in FORMATS}
    return Problem(classes, Cluster(devices, Network(bandwidth, 3e-5)))
