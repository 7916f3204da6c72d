"""Inputs of reports: a small BERT on a fleet of two device classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import qsync_fx
from qsync_fx.allocator.analysis import ParetoFront, pareto
from qsync_fx.allocator.api import get_allocator
from qsync_fx.allocator.plan_result import PlanResult
from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network
from qsync_fx.profiler.profile import Profile

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 100,
}


@dataclass(frozen=True)
class Fleet:
    """A planned model: everything that a report can show."""

    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity
    cluster: Cluster
    answer: PlanResult
    front: ParetoFront
    explanation: Explanation


def loss(model: Any, batch: Any) -> Tensor:
    result: Tensor = model(**batch).loss
    return result


def even_sensitivity(profile: Profile) -> Sensitivity:
    """Return variances that depend only on the index, as real ones of BERT-base take minutes."""
    variance = {
        operator.id: {"fp16": 1e-6 * (index % 7 + 1), "int8": 1e-3 * (index % 5 + 1)}
        for index, operator in enumerate(profile.graph.operators)
    }
    return Sensitivity("second_order", "Bert", variance, steps=1)


def planned(model: nn.Module, batch: Mapping[str, Tensor], points: int = 4) -> Fleet:
    """Return a plan of a model for eight V100 and eight T4."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    profiles = {
        name: qsync_fx.catalog_profile(name, model, loss, batch, optimizer=optimizer)
        for name in ("v100", "t4")
    }
    sensitivity = even_sensitivity(profiles["t4"])
    devices = {
        name: ClusterDevice(count=8, batch=8, memory=memory)
        for name, memory in (("v100", "32 GB"), ("t4", "16 GB"))
    }
    cluster = Cluster(devices, Network(bandwidth=1.25e10, latency=3e-5))
    answer = qsync_fx.find_plan(profiles, cluster, sensitivity=sensitivity)
    front = pareto(answer.problem, get_allocator("milp"), points, answer)
    options = {"plan": answer.plan("t4"), "target": "t4"}
    explanation = qsync_fx.explain(model, **batch, options=options)
    return Fleet(profiles, sensitivity, cluster, answer, front, explanation)


def bert_of(sizes: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**sizes)).train()
    batch = {"input_ids": torch.randint(0, 100, (8, 128)), "labels": torch.zeros(8).long()}
    return model, batch


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return planned(*bert_of(SMALL))
