"""Error of predicted peak memory, for random mixed plans compiled with Inductor.
Each plan is compiled and trained, and all allocations of its second step are counted. "of" is
"passes" (forward and backward) or "step" (with the optimizer). "real_mb" and the next column are
the measured and the predicted peak without parameters, buffers and optimizer state. "error" is the
difference in percent, and "whole_error" the same with parameters, buffers and optimizer state
included. "at" is the operator at the predicted peak and "saved_mb" the predicted size of saved
tensors. The last rows give the mean and the worst absolute errors of each model's mixed plans. With
--without-kernels no Inductor kernel is built or run: the allocations are the same, and a plan needs
seconds instead of minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import States, states
from qsync_fx.predictor.memory import (
    Category,
    LossMemory,
    OptimizerMemory,
    TrainingMemory,
    step_memory,
)
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.timing.measured_memory import loss_memory, measured_peak, optimizer_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import (
    CASES,
    PRECISIONS,
    QUICK,
    Case,
    ResNet18,
    bert,
    classifier,
    mixed_plans,
    vgg11_bn,
)
from benchmarks.support.harness import Row, arguments, by_size, finish, selected, write_json
from benchmarks.support.unbuilt import without_kernels

SPACE = "passes", "step"


class Words(nn.Module):
    """torch's encoder after word and position embeddings."""

    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        logits: Tensor = self.head(self.layers(self.words(ids) + self.places(places)).mean(1))
        return logits


def words() -> Case:
    model, batch = Words(5000, 128, 64), (torch.randint(5000, (16, 64)), torch.randint(10, (16,)))

    def step(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    return Case(model, batch, step, torch.optim.AdamW(model.parameters(), lr=1e-6))


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=5000))
    batch = torch.randint(5000, (8, 128)), torch.randn(8, 128, 256)

    def step(model: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]).last_hidden_state.float(), batch[1])

    return Case(model, batch, step, torch.optim.AdamW(model.parameters(), lr=1e-6))


HELD_OUT: Mapping[str, Callable[[], Case]] = {
    "BERT 2 layers, 8 x 128 tokens": lambda: bert(2, 8, 128),
    "BERT 4 layers, 4 x 128 tokens": lambda: bert(4, 4, 128),
    "ResNet-18, 32 x 64 x 64": lambda: classifier(ResNet18(), 32, 64),
    "VGG-11-BN, 16 x 64 x 64": lambda: classifier(vgg11_bn(), 16, 64),
    "GPT-2, 2 layers 256 wide, 8 x 128 tokens": gpt2,
    "torch's encoder, 2 layers 128 wide, 16 x 64 words": words,
}
"""Models that were not used to develop the memory model."""


def loss_of(case: Case) -> LossMemory:
    """Return the memory of the loss for outputs of the model's size."""
    with torch.no_grad():
        returned = case.model(case.batch[0])
    plain = isinstance(returned, Tensor)

    def loss(result: Tensor) -> Tensor:
        output = result if plain else SimpleNamespace(last_hidden_state=result)
        return case.step(lambda _: output, case.batch)

    return loss_memory(loss, returned if plain else returned.last_hidden_state)


def measured(case: Case, plan: Plan) -> dict[str, int]:
    """Return the measured peak bytes of forward and backward, and of a full step."""
    torch._dynamo.reset()
    model = torch.compile(case.model, backend="qsync", options={"plan": plan})  # type: ignore[dict-item]

    def passes(finish: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            case.step(model, case.batch).backward()  # type: ignore[no-untyped-call]
            finish()
            case.optimizer.zero_grad(set_to_none=True)

        return run

    step = passes(case.optimizer.step)
    step()
    return {"passes": measured_peak(passes(lambda: None)), "step": measured_peak(step)}


def rows_of(name: str, case: Case, count: int) -> Iterator[Row]:
    # After a case of another size, Dynamo would trace with symbolic sizes.
    torch._dynamo.reset()
    explanation = qsync_fx.explain(case.model.train(), case.batch[0])
    graph = build_model_graph(explanation, PRECISIONS)
    ids = [str(op_id) for op_id in explanation.plan().operators]
    plans = {fmt: Plan.uniform(fmt) for fmt in PRECISIONS} | mixed_plans(ids, count)
    loss = loss_of(case)
    trainings = {
        "passes": TrainingMemory(OptimizerMemory(), loss=loss),
        "step": TrainingMemory(optimizer_memory(case.optimizer), loss=loss),
    }
    for label, plan in plans.items():
        real, predicted = measured(case, plan), states(graph, plan)
        for space in SPACE:
            yield _row(name, label, space, predicted, real[space], trainings[space])


def _row(
    name: str,
    label: str,
    space: str,
    predicted: States,
    real: int,
    training: TrainingMemory,
) -> Row:
    memory = step_memory(predicted, training)
    return {
        "case": name,
        "plan": label,
        "of": space,
        "real_mb": real / 1e6,
        "predicted_mb": memory.step_bytes / 1e6,
        "error": 100 * (memory.step_bytes / real - 1),
        "whole_error": 100 * (memory.step_bytes - real) / (real + memory.held_bytes),
        "at": f"{memory.peak.place} {memory.peak.operator}".strip(),
        "saved_mb": max(moment.of(Category.SAVED) for moment in memory.moments) / 1e6,
    }


def summaries(rows: list[Row]) -> list[Row]:
    """Return the mean and the worst error of each model's mixed plans."""
    result: list[Row] = []
    for name in dict.fromkeys(row["case"] for row in rows):
        for space in SPACE:
            mixed = [
                r
                for r in rows
                if r["case"] == name and r["of"] == space and r["plan"] not in PRECISIONS
            ]
            if mixed:
                result += [
                    {"case": name, "plan": label, "of": space}
                    | {key: of(abs(row[key]) for row in mixed) for key in ("error", "whole_error")}
                    for label, of in (
                        ("mean of mixed plans", statistics.mean),
                        ("worst of mixed plans", max),
                    )
                ]
    return result


def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    counts = by_size(
        options.quick,
        dict.fromkeys(QUICK, 2),
        dict.fromkeys(CASES, options.plans) | dict.fromkeys(HELD_OUT, options.held_out),
    )
    for name, make in selected(
        options, by_size(options.quick, QUICK, {**CASES, **HELD_OUT})
    ).items():
        torch.manual_seed(0)
        for row in rows_of(name, make(), counts[name]):
            rows.append(row)
            print(f"{name}: {row['plan']}, {row['of']}: {row['error']:.2f}%", flush=True)
            if options.json:
                write_json(
                    options.json, rows, quick=options.quick, without_kernels=options.without_kernels
                )
    return rows


def main() -> None:
    options = arguments(
        __doc__,
        only={"help": "cases whose names begin so: bert, resnet, vgg, gpt-2, torch"},
        plans={"type": int, "default": 20, "help": "mixed plans a model (%(default)s)"},
        held_out={
            "type": int,
            "default": 6,
            "help": "mixed plans of models that no rule was found on (%(default)s)",
        },
        without_kernels={
            "action": "store_true",
            "help": "allocate only: build and run no kernel of the compiler's",
        },
    )
    if options.without_kernels:
        with without_kernels():
            rows = run(options)
    else:
        rows = run(options)
    finish(options, [*rows, *summaries(rows)])


if __name__ == "__main__":
    main()
