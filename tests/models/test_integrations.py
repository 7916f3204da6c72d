"""What docs/integrations.md says of other libraries: where their own switches do not do, and what
wins beside a plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Plan


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def compiled(model: nn.Module, plan: Plan) -> list[dict[str, str]]:
    """Compiles the model in place; returns what will hold the precisions of each of its graphs."""
    found: list[dict[str, str]] = []

    @qsync_fx.graph_pass(after="lower")
    def collect(graph: qsync_fx.PrecisionGraph) -> None:
        found.append({op.id.module: str(op.precision) for op in graph.operators(kind="adjustable")})

    model.compile(
        backend="qsync", options={"plan": plan, "inner_backend": "aot_eager", "passes": [collect]}
    )
    return found


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("accelerate")
    # Trainers hand their switch on through the environment, and Accelerate keeps what it was made
    # with first.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_knows_no_backend_of_ours(accelerate: Any) -> None:
    """When this fails, the page can say that its switch does."""
    with pytest.raises(ValueError, match="QSYNC"):
        accelerate.Accelerator(cpu=True, dynamo_backend="qsync")


def test_trainer_hands_the_name_to_accelerate(accelerate: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", torch_compile_backend="qsync"
    )
    with pytest.raises(ValueError, match="QSYNC"):
        transformers.Trainer(Network(), arguments)


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_a_plan_wins_over_the_mixed_precision_of_accelerate(mixed: str, accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    network = Network()
    found = compiled(network, Plan("int8", [("head", "fp32")]))
    model = accelerator.prepare(network)
    accelerator.backward(model(torch.randn(2, 8)).sum())
    assert found == [{"body": "int8", "head": "fp32"}]
    assert list(accelerator.get_state_dict(model)) == list(Network().state_dict())


def test_a_lightning_module_compiled_in_place_is_left_as_it_is(tmp_path: Path) -> None:
    """And so is its network, were it not compiled itself, as the page does."""
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
        found = compiled(module.network if inside else module, Plan("int8"))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(module, loader)
        assert found == ([{"body": "int8", "head": "int8"}] if inside else [])
