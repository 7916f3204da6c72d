"""Measured profiles: contents, preserved training state, interruption, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.profiler.measurement import measure
from qsync_fx.profiler.profile import SAMPLES, Profile
from qsync_fx.profiler.timing.inductor_lines import watching
from tests.support.models.small_models import Perceptron, build
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick
from tests.support.tiers import ALL


def test_profile_sums_up_and_preserves_the_training_state(
    tmp_path: Path,
) -> None:
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters())
    weight, generator = model.weight.clone(), torch.get_rng_state()
    profile = quick(model, Counted(), optimizer=optimizer, path=tmp_path / "layer.json")
    (run,) = profile.runs
    assert run.label == "fp32" and len(run.steps) == 2 and run.peak_bytes >= 4 * 8 * 4
    (linear,) = run.operators
    assert linear.operator == "/linear" and (linear.precision, linear.output) == ("fp32", "fp32")
    assert linear.forward > 0 and linear.backward > 0, (
        "each pass has a product: the output and the weight gradient"
    )
    assert (
        linear.forward + run.outside[0] >= run.forward
        and linear.backward + run.outside[1] >= run.backward
    )
    assert profile.optimizer == "AdamW" and profile.optimizer_seconds > 0
    assert profile.loss_memory is not None and profile.loss_memory.held == 4 * 4 * 8, (
        "mse_loss saves one tensor of the output's shape"
    )
    assert Profile.load(tmp_path / "layer.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["layer.json"]
    assert torch.equal(model.weight, weight) and torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3


@ALL
def test_plan_may_use_formats_beyond_the_measured_ones() -> None:
    narrow = qsync_fx.Plan.uniform("bf16")
    profile = quick(layer(), Counted(), plan=narrow, repeats=1)
    assert [run.planned for run in profile.runs] == [False, True]
    assert profile.interpolated(narrow) == []
    seconds = qsync_fx.replay(narrow, profile).seconds
    assert seconds > 0


def test_profile_contains_a_requested_sensitivity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = iter([(torch.randn(4, 16), torch.randn(4, 8)) for _ in range(3)])
    step = Counted()
    profile = measure(layer(), step, batches, ["fp32"], repeats=1, sensitivity="paper")
    assert "; then 4 to 50 steps for the sensitivity" in capsys.readouterr().err
    assert profile.sensitivity is not None and profile.sensitivity.steps == 3
    assert str(profile)


def test_dynamo_compiles_the_model_as_often_afterwards_as_before() -> None:
    model = layer()
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            quick(model, Counted(), repeats=1)
        compiled = torch.compile(
            model, backend="qsync", options={"inner_backend": "eager", "precision": "fp32"}
        )
        compiled(BATCH[0])
    assert qsync_fx.plan_coverage(compiled).complete
    assert [str(ran.id) for ran in qsync_fx.plan_coverage(compiled).operators] == ["/linear"]


def test_interrupted_measurement_resumes(tmp_path: Path) -> None:
    uninterrupted = Counted()
    quick(layer(), uninterrupted, repeats=3)
    path = tmp_path / "layer.json"
    with pytest.raises(KeyboardInterrupt):
        quick(layer(), Counted(interrupted_at=uninterrupted.calls - 1), repeats=3, path=path)
    (partial,) = tmp_path.iterdir()
    samples = SAMPLES.load(partial)
    assert samples.rounds == 2
    rest = Counted()
    profile = quick(layer(), rest, repeats=3, path=path)
    assert uninterrupted.calls - rest.calls == 2 * 3, (
        "the two completed rounds of three steps each are not repeated"
    )
    assert len(profile.runs[0].steps) == 3 and not partial.exists()


def test_partial_file_of_another_measurement_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    with pytest.raises(KeyboardInterrupt):
        quick(layer(), Counted(interrupted_at=11), path=path)
    other = nn.Sequential(layer(), nn.ReLU())
    with pytest.raises(ProfileError, match="another model") as caught:
        quick(other, Counted(), path=path)
    assert str(tmp_path) in str(caught.value) and "remove" in (caught.value.do or "")
    with pytest.raises(ProfileError, match="another model"):
        quick(layer().eval(), Counted(), path=path)
    with pytest.raises(ProfileError, match="another model"):
        quick(layer(), Counted(), path=path, options={"rounding": "nearest"})
    with pytest.raises(ProfileError, match="another optimizer"):
        quick(layer(), Counted(), path=path, optimizer=torch.optim.SGD)
    Path(f"{path}.partial").write_text(Path(f"{path}.partial").read_text()[:-40])
    with pytest.raises(ProfileError, match="is truncated"):
        quick(layer(), Counted(), path=path)


def test_invalid_measurement_is_reported_before_compilation(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="did not call the model"):
        quick(layer(), lambda model, batch: batch[0].clone().requires_grad_().sum())
    with pytest.raises(ProfileError, match="a float, which is no loss"):
        quick(layer(), lambda model, batch: 3.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ProfileError, match="a tensor of shape"):
        quick(layer(), lambda model, batch: model(batch[0]))
    with pytest.raises(OptionError, match="0 times"):
        quick(layer(), Counted(), repeats=0)
    step = Counted()
    with pytest.raises(ProfileError, match="No such file or directory"):
        quick(layer(), step, path=tmp_path / "missing" / "layer.json")
    assert not step.calls
    with pytest.raises(OptionError, match="a module is required"):
        quick(torch.relu, Counted())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no batch"):
        measure(layer(), Counted(), [], ["fp32"])
    with pytest.raises(ProfileError, match="on the CPU, or on one GPU"):
        quick(nn.Linear(2, 2, device="meta"), Counted())


def test_step_that_calls_backward_is_an_error() -> None:
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = Counted()(model, batch)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    weight = model.weight.clone()
    with pytest.raises(ProfileError, match=r"the step calls backward\(\) itself") as caught:
        quick(model, trains, optimizer=optimizer)
    assert caught.value.where == "step" and "return the loss, without backward()" in (
        caught.value.do or ""
    )
    assert torch.equal(model.weight, weight) and model.weight.grad is None
    quick(model, Counted(), optimizer=optimizer, repeats=1)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_refused(number: str) -> None:
    with pytest.raises(ProfileError, match=f"the loss is {number}") as caught:
        quick(layer(), lambda model, batch: Counted()(model, batch) * float(number))
    assert caught.value.where == "step"


def test_cost_is_logged_before_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    step = Counted()
    quick(layer(), step, progress=True)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qsync: ")]
    assert f"1 compilation and {step.calls - 4} steps" in line and "Linear under 1 plan:" in line


def test_wrapper_lines_are_mapped_to_nodes() -> None:
    """Pin the used parts of Inductor: line numbers, their nodes, and the loading of wrappers."""
    with watching() as files:
        compiled = torch.compile(
            layer(), backend="qsync", options={"precision": "fp32"}, dynamic=False
        )
        compiled(BATCH[0]).sum().backward()
    kernels = [kernel for lines in files.values() for kernel in lines.values()]
    assert len(files) == 2, "one wrapper for the forward and one for the backward pass"
    assert [(kernel.library, len(kernel.nodes)) for kernel in kernels] == [(True, 1), (True, 1)]
    for kernel in kernels:
        (node,) = kernel.nodes
        assert node.target == "aten.mm.default" and node.owner == "/linear"
        assert node.bytes == 4 * (4 * 16 + 16 * 8 + 4 * 8)


@pytest.fixture(scope="module")
def perceptron() -> Profile:
    """Return a profile of a model with three linear layers and activations, in three formats."""
    model = build(Perceptron)
    plan = qsync_fx.Plan.uniform("bf16").with_precision("head", "int8")
    batch = torch.randn(64, 16), torch.randn(64, 10)
    return measure(
        model,
        Counted(),
        [batch],
        ["fp32", "bf16", "int8"],
        plan=plan,
        repeats=2,
        progress=False,
        sensitivity=None,
    )


@ALL
def test_every_plan_shows_other_states(perceptron: Profile) -> None:
    labels = [run.label for run in perceptron.runs]
    assert labels[:3] == ["fp32", "bf16", "int8"] and len(labels) == len(set(labels))
    assert [run.planned for run in perceptron.runs] == [False] * (len(labels) - 1) + [True]
    states = [tuple((m.precision, m.output) for m in run.operators) for run in perceptron.runs]
    assert len(set(states)) == len(states)
    head = next(m for m in perceptron.runs[-1].operators if m.operator == "head/linear")
    assert head.precision == "int8"


@ALL
def test_pass_time_is_the_sum_of_operators_and_the_rest(
    perceptron: Profile,
) -> None:
    for run in perceptron.runs:
        every = [m.operator for m in run.operators]
        assert {
            "layers.0/linear",
            "layers.1/relu",
            "layers.3/linear",
            "layers.4/tanh",
            "head/linear",
        } <= set(every)
        idle = {m.operator for m in run.operators if not (m.forward > 0 and m.backward > 0)}
        assert idle <= {"layers.2/dropout"}, "only dropout with probability zero computes nothing"


@ALL
def test_quantizers_are_apart(perceptron: Profile) -> None:
    pairs = {(call.before, call.after) for run in perceptron.runs for call in run.quantized}
    assert pairs and all(after == "int8" for _, after in pairs)


def test_fp32_plan_adds_no_variance() -> None:
    """The model has gates, which any noise would flip."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    step = Counted()
    batches = [(torch.randn(4, 16), torch.randn(4, 8))]
    profile = measure(model, step, batches, ["fp32"], repeats=1, progress=False)
    assert profile.sensitivity is not None
    assert {value for by in profile.sensitivity.variance.values() for value in by.values()} == {0.0}
