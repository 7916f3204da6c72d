"""Trainer callbacks: reports of each optimizer step, and plan switches at scheduled steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qsync_fx import OptionError, Plan
from qsync_fx.monitoring.plan_schedule import PlanSchedule
from qsync_fx.plan_switching import options_of
from tests.support.compiling.switched import NOT_FOLLOWED
from tests.support.models.small_models import Perceptron, build

pytestmark = NOT_FOLLOWED
torch.set_num_threads(1)

OPTIONS = {"plan": Plan.uniform("int8"), "inner_backend": "aot_eager"}
LATER = Plan("bf16", notes={"seconds": "0.5"})


class Recorder:
    """Metrics sink that records the default format of the model's plan at each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rows = model, dict[int, dict[str, float]]()
        self.formats: dict[int, str] = {}
        self.closed = 0

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows[step] = dict(metrics)
        self.formats[step] = str(options_of(self.model)[0].plan.default)  # type: ignore[union-attr]

    def close(self) -> None:
        self.closed += 1


def test_trainer_reports_steps_and_switches_plans_also_after_a_resume(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from qsync_fx.monitoring import TrainerMonitor

    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    data = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(1)} for _ in range(32)]

    def trained(steps: int, resumes: bool) -> Recorder:
        model = transformers.BertForSequenceClassification(config)
        model.compile(backend="qsync", options=OPTIONS)
        recorder = Recorder(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        callback = TrainerMonitor(recorder, plans={2: LATER}, every=2)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resumes)
        return recorder

    first = trained(3, resumes=False)
    assert first.formats == {1: "int8", 2: "int8", 3: "bf16"}
    assert first.rows[3]["predicted_s"] == 0.5
    assert any(name.startswith("scale/") for name in first.rows[2])
    assert trained(4, resumes=True).formats == {4: "bf16"}
    assert first.closed == 1


def test_lightning_reports_steps_and_switches_plans(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from qsync_fx.monitoring import LightningMonitor

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = build(Perceptron)
            self.network.compile(backend="qsync", options=OPTIONS)

        def training_step(self, batch: Any, index: int) -> Any:
            if index == self.fails_at:
                raise RuntimeError("planted")
            return self.network(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8)

    def fit(fails_at: int = -1) -> Recorder:
        module = Module()
        module.fails_at = fails_at
        recorder = Recorder(module)
        trainer = lightning.Trainer(
            max_steps=4,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[LightningMonitor(recorder, plans={2: LATER})],
        )
        trainer.fit(module, loader)
        return recorder

    recorder = fit()
    assert recorder.formats == {1: "int8", 2: "int8", 3: "bf16", 4: "bf16"}
    assert recorder.closed == 1
    with pytest.raises(RuntimeError, match="planted"):
        fit(fails_at=1)


def test_steps_of_plans_are_checked() -> None:
    with pytest.raises(OptionError, match="'2' is not a number of steps"):
        PlanSchedule(plans={"2": LATER})  # type: ignore[dict-item]
