"""Accelerate, transformers.Trainer and Lightning with the backend, as in docs/integrations.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.integrations import enable_accelerate


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def compiled(model: nn.Module, plan: Plan) -> list[dict[str, str]]:
    """Compile the model in place; return a list that receives the precisions of each graph."""
    precisions: list[dict[str, str]] = []

    @qsync_fx.graph_pass(after="lower")
    def collect(graph: qsync_fx.PrecisionGraph) -> None:
        precisions.append(
            {op.id.module: str(op.precision) for op in graph.operators(kind="adjustable")}
        )

    model.compile(
        backend="qsync", options={"plan": plan, "inner_backend": "aot_eager", "passes": [collect]}
    )
    return precisions


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("accelerate")
    # Trainers pass their setting in the environment, and Accelerate's state is a singleton that
    # retains its first values.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_name_is_unknown_to_accelerate_before_the_call(accelerate: Any) -> None:
    """If this fails, docs/integrations.md does not need `enable_accelerate` any more."""
    with pytest.raises(ValueError, match="QSYNC"):
        accelerate.Accelerator(cpu=True, dynamo_backend="qsync")


@pytest.fixture
def enabled(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Accelerate, whose changed attributes are restored after the test."""
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    monkeypatch.setattr(DynamoBackend, "_missing_", DynamoBackend._missing_)
    monkeypatch.setattr(TorchDynamoPlugin, "__post_init__", TorchDynamoPlugin.__post_init__)
    return accelerate


def covered(model: Any) -> dict[str, str]:
    """Return the precision of each adjustable operator that has run, by module."""
    coverage = qsync_fx.plan_coverage(model)
    assert coverage.complete
    return {
        ran.id.module: str(ran.precision) for ran in coverage.operators if ran.kind == "adjustable"
    }


@pytest.mark.parametrize("source", ["argument", "plugin", "variable"])
def test_accelerate_compiles_with_qsync(
    source: str, enabled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import TorchDynamoPlugin

    eager = {"inner_backend": "aot_eager"}
    enable_accelerate({"plan": {"default": "int8", "head": "fp32"}, **eager})
    enable_accelerate({"plan": {"default": "bf16", "head": "fp32"}, **eager})
    made: dict[str, Any] = {"dynamo_backend": "qsync"}
    expected = {"body": "bf16", "head": "fp32"}
    if source == "plugin":
        options = {"plan": Plan("fp32", [("head", "int8")]), **eager}
        made = {"dynamo_plugin": TorchDynamoPlugin(backend="qsync", options=options)}
        expected = {"body": "fp32", "head": "int8"}
    elif source == "variable":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "qsync")
        made = {}
    accelerator = enabled.Accelerator(cpu=True, **made)
    model = accelerator.prepare(Network())
    accelerator.backward(model(torch.randn(2, 8)).sum())
    assert covered(model) == expected
    assert list(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict()) == list(
        Network().state_dict()
    )


def test_other_backends_of_accelerate_get_no_options_of_qsync(enabled: Any) -> None:
    from accelerate.utils import TorchDynamoPlugin

    enable_accelerate({"precision": "int8"})
    assert TorchDynamoPlugin(backend="aot_eager").options is None
    assert TorchDynamoPlugin(backend="qsync").to_kwargs()["options"] == {"precision": "int8"}
    with pytest.raises(ValueError, match="QSYNK"):
        TorchDynamoPlugin(backend="qsynk")


def test_trainer_compiles_with_qsync(enabled: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    enable_accelerate(
        {"plan": Plan("int8", [("classifier", "fp32")]), "inner_backend": "aot_eager"}
    )
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"input_ids": torch.randint(100, (8,)), "labels": torch.tensor(1)} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        torch_compile_backend="qsync",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    precisions = covered(trainer.model_wrapped)
    assert precisions.pop("classifier") == "fp32"
    assert precisions["bert.encoder.layer.0.output.dense"] == "int8"
    # Trainer saves the trained model without wrappers.
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert loaded.state_dict().keys() == before.keys()
    assert not torch.equal(loaded.classifier.weight, before["classifier.weight"])


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_a_plan_wins_over_the_mixed_precision_of_accelerate(mixed: str, accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    network = Network()
    precisions = compiled(network, Plan("int8", [("head", "fp32")]))
    model = accelerator.prepare(network)
    accelerator.backward(model(torch.randn(2, 8)).sum())
    assert precisions == [{"body": "int8", "head": "fp32"}]
    assert list(accelerator.get_state_dict(model)) == list(Network().state_dict())


def test_a_lightning_module_compiled_in_place_is_left_as_it_is(tmp_path: Path) -> None:
    """Lightning calls `training_step`, not the compiled call of the module. A compiled network in
    the module runs compiled.
    """
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.network(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=4
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for inside in (False, True):
        module = Lit()
        precisions = compiled(module.network if inside else module, Plan("int8"))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(module, loader)
        assert precisions == ([{"body": "int8", "head": "int8"}] if inside else [])
