"""Rewrites of docs/howto-rewrite.md on a BERT, a checkpointed BERT and a ViT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from tests.support import pages, tiers
from tests.support.models import zoo
from tests.support.models.small_models import assert_equal, gradients
from tests.support.models.zoo_torch import Inputs

torch.set_num_threads(1)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "howto-rewrite.md").read_text()
BLOCKS = {
    block.values["rewrite"]: block.text for block in pages.blocks(PAGE) if "rewrite" in block.values
}
OPERATOR = next(block.text for block in pages.blocks(PAGE) if "custom_op" in block.text)
CASES = {case.name: case for case in zoo.CASES if case.name in ("bert", "bert_recomputing", "vit")}
LAYERS = {"bert": 8, "bert_recomputing": 14, "vit": 7}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def written(name: str, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Run a block of the page for a model; return the rewrite, and all names that the block
    defines.
    """
    namespace: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "qsync_fx": qsync_fx,
        "net": model,
    }
    if name == "fused" and not hasattr(torch.ops.fused, "gelu_norm"):
        exec(OPERATOR, namespace)
    namespace.setdefault("fused_gelu_norm", getattr(torch.ops.fused, "gelu_norm", None))
    torch.manual_seed(5)
    exec(BLOCKS[name], namespace)
    (rewrite,) = {
        id(value): value
        for value in namespace.values()
        if isinstance(value, qsync_fx.passes.pass_base.GraphPass)
    }.values()
    return rewrite, namespace


def made(name: str) -> tuple[nn.Module, Inputs]:
    return zoo.make(CASES[name])


def step(run: Any, model: nn.Module, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = zoo.loss_of(run(**inputs))
    loss.backward()
    return loss.detach(), gradients(model)


def fast(model: nn.Module, *passes: Any, precision: str = "fp32") -> Any:
    options: Any = {"precision": precision, "inner_backend": "aot_eager", "passes": list(passes)}
    return torch.compile(model, backend="qsync", options=options)


def places(rewrite: Any, model: nn.Module, inputs: Inputs) -> int:
    explanation = qsync_fx.explain(
        model, **inputs, options={"precision": "int8", "passes": [rewrite]}
    )
    done = explanation.rewritten[rewrite.name]
    assert not done.left
    return done.count


def close(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert torch.allclose(actual[name], wanted[name], rtol=1e-3, atol=1e-5), name


def test_each_is_under_ten_lines() -> None:
    assert set(BLOCKS) == {"fused", "adapter", "quantizer", "tap"}
    for name, text in BLOCKS.items():
        assert sum(bool(line.strip()) for line in text.splitlines()) < 10, name


@pytest.mark.parametrize("case", ["bert", pytest.param("vit", marks=tiers.ALL)])
def test_a_fused_operator(case: str) -> None:
    model, inputs = made(case)
    rewrite, _ = written("fused", model)
    assert places(rewrite, model, inputs) == {"bert": 1, "vit": 0}[case]
    expected = step(model, model, inputs)
    actual = step(fast(model, rewrite), model, inputs)
    assert torch.allclose(actual[0], expected[0], rtol=1e-5)
    close(actual[1], expected[1])


@tiers.ALL
@pytest.mark.parametrize("case", ["vit", pytest.param("bert_recomputing", marks=tiers.EVERY)])
def test_a_low_rank_adapter(case: str) -> None:
    model, inputs = made(case)
    rewrite, namespace = written("adapter", model)
    adapters = namespace["adapters"]
    assert places(rewrite, model, inputs) == len(adapters) > 0

    def with_adapters(model: nn.Module) -> nn.Module:
        """Return a copy of the model with the adapters as forward hooks."""
        changed = copy.deepcopy(model)
        for name, adapter in adapters.items():

            def add(
                layer: nn.Module, args: tuple[Tensor], output: Tensor, adapter: nn.Module = adapter
            ) -> Tensor:
                return output + adapter(args[0])

            changed.get_submodule(name).register_forward_hook(add)
        return changed

    weights = nn.ParameterList(p for adapter in adapters.values() for p in adapter.parameters())
    before = [p.detach().clone() for p in weights]

    def trained(run: Any) -> tuple[list[float], list[Tensor]]:
        for p, value in zip(weights, before, strict=True):
            p.data.copy_(value)
        optimizer = torch.optim.SGD(weights, lr=1.0)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = zoo.loss_of(run(**inputs))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, [p.detach().clone() for p in weights]

    plain = with_adapters(model.requires_grad_(False))
    expected_losses, expected_weights = trained(plain)
    actual_losses, actual_weights = trained(fast(model, rewrite))
    assert actual_losses == pytest.approx(expected_losses, rel=1e-4)
    assert actual_losses[-1] < actual_losses[0]
    for actual, expected, start in zip(actual_weights, expected_weights, before, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-5)
        assert not torch.equal(actual, start)
    assert all(p.grad is None for p in model.parameters())
    assert trained(fast(model, rewrite, precision="int8"))[0] == pytest.approx(
        expected_losses, rel=0.02
    )


@pytest.mark.parametrize("case", ["vit", pytest.param("bert", marks=tiers.ALL)])
def test_a_fake_quantizer(case: str) -> None:
    model, inputs = made(case)
    rewrite, _ = written("quantizer", model)
    assert places(rewrite, model, inputs) == LAYERS[case]
    coarse = copy.deepcopy(model)
    for layer in coarse.modules():
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                scale = layer.weight.abs().amax() / 7
                layer.weight.copy_((layer.weight / scale).round() * scale)
    # The reference quantizes a tied weight for all its readers, the rewrite only for the linear
    # layers.
    tied = case.startswith("bert")
    expected = step(coarse, coarse, inputs)
    actual = step(fast(model, rewrite), model, inputs)
    if not tied:
        assert torch.allclose(actual[0], expected[0], rtol=1e-5)
        close(actual[1], expected[1])
    assert actual[1].keys() == expected[1].keys()
    assert not torch.equal(actual[0], step(model, model, inputs)[0])


@pytest.mark.parametrize("case", ["vit", pytest.param("bert_recomputing", marks=tiers.ALL)])
def test_a_tap(case: str) -> None:
    model, inputs = made(case)
    rewrite, namespace = written("tap", model)
    largest = namespace["largest"]
    assert places(rewrite, model, inputs) == len(largest) == LAYERS[case]
    read: dict[str, float] = {}
    watched = copy.deepcopy(model)
    for name in largest:

        def note(layer: nn.Module, args: tuple[Tensor], name: str = name) -> None:
            read[name] = float(args[0].detach().abs().amax())

        watched.get_submodule(name).register_forward_pre_hook(note)
    expected = step(watched, watched, inputs)
    plain = step(fast(model), model, inputs)
    actual = step(fast(model, rewrite), model, inputs)
    assert torch.equal(actual[0], plain[0])
    assert_equal(actual[1], plain[1])
    close(actual[1], expected[1])
    assert {name: float(value) for name, value in largest.items()} == pytest.approx(read, rel=1e-4)


@tiers.ALL
@pytest.mark.parametrize("case", ["bert", pytest.param("vit", marks=tiers.EVERY)])
def test_rewrites_together(case: str) -> None:
    model, inputs = made(case)
    passes = [written(name, model)[0] for name in ("tap", "adapter", "quantizer", "fused")]
    explanation = qsync_fx.explain(model, **inputs, options={"precision": "int8", "passes": passes})
    counts = {name: done.count for name, done in explanation.rewritten.items()}
    assert counts["tap"] == LAYERS[case]
    assert counts["any_layer"] == counts["tap"], (
        "adapters have no bias, so the pattern does not match them"
    )
    loss, grads = step(fast(model, *passes, precision="int8"), model, inputs)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads.values())
