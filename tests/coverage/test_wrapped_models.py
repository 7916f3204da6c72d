"""Models that are wrapped, sharded, or compiled block by block. Operators have the ids of the full
model and follow its plan. A pattern without a match is reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import qsync_fx
from qsync_fx import OptionError, Plan, PlanError, PlanWarning
from tests.support import tiers

torch.set_num_threads(1)

X = torch.randn(4, 16)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialize a process group of one rank."""
    path: Path = tmp_path_factory.mktemp("world") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(torch.relu(x))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)
    )


def sequential_block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU())


def options(**settings: Any) -> dict[str, Any]:
    return {"inner_backend": "aot_eager", **settings}


def compiled(model: Any, **settings: Any) -> Any:
    return torch.compile(model, backend="qsync", options=options(**settings))


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def planned(model: nn.Module) -> dict[str, str]:
    return {
        str(ran.id): str(ran.precision)
        for ran in qsync_fx.plan_coverage(model).operators
        if ran.kind == "adjustable"
    }


def expected(make: Callable[[], nn.Module], plan: Plan) -> dict[str, str]:
    operators = qsync_fx.explain(make(), X, options={"plan": plan}).operators
    return {
        str(operator.id): str(operator.precision)
        for operator in operators
        if operator.kind == "adjustable"
    }


def train(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call(X.clone()).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught if issubclass(warning.category, PlanWarning)]


def every_block(model: nn.Module, **settings: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="qsync", options=options(**settings))
    return model


PLANS = {
    "model": Plan(
        "bf16", patterns=[("blocks.1", "int8"), ("head", "fp32"), ("stem/linear", "fp32")]
    ),
    "sequential": Plan("bf16", patterns=[("2", "int8"), ("3/linear", "fp32")]),
}
MAKE: dict[str, Callable[[], nn.Module]] = {"model": Model, "sequential": sequential}

WRAPPED: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "compile(DataParallel)": lambda model, settings: compiled(DataParallel(model), **settings),
    "DataParallel(compile)": lambda model, settings: DataParallel(compiled(model, **settings)),
    "compile(DDP)": lambda model, settings: compiled(DistributedDataParallel(model), **settings),
    "DDP(compile)": lambda model, settings: DistributedDataParallel(compiled(model, **settings)),
    "compile(FSDP2)": lambda model, settings: compiled(sharded(model), **settings),
    "function": lambda model, settings: compiled(lambda x: model(x), **settings),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapped_model(wrapper: str, kind: str) -> None:
    model = MAKE[kind]()
    plan = PLANS[kind]
    messages = train(model, WRAPPED[wrapper](model, {"plan": plan, "strict": False}))
    precisions = planned(model)
    if wrapper == "compile(DDP)" and kind == "sequential":
        # Dynamo does not compile a module of a torch class that DDP calls.
        assert precisions == {}
        assert "compile the module itself before it is wrapped" in messages[0]
        return
    if wrapper == "compile(FSDP2)" and kind == "model":
        # FSDP2's hooks break the graph in the loop over blocks. Code outside of the blocks runs
        # in eager mode, which is FP32.
        assert precisions == {
            name: fmt
            for name, fmt in expected(MAKE[kind], plan).items()
            if name.startswith("blocks")
        }
        assert {module.path for module in qsync_fx.plan_coverage(model).uncovered} == {
            "stem",
            "head",
        }
    else:
        assert precisions == expected(MAKE[kind], plan)
    assert messages == []


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "mode",
    [
        "ddp_optimizer",
        *(
            pytest.param(mode, marks=tiers.ALL)
            for mode in (
                "python_reducer",
                "no_optimization",
                "python_reducer_without_compiled_forward",
            )
        ),
    ],
)
def test_all_modes_of_ddp(mode: str) -> None:
    plan = PLANS["model"]
    for wrapper in ("compile(DDP)", "DDP(compile)"):
        torch._dynamo.reset()
        model = Model()
        with torch._dynamo.config.patch(optimize_ddp=mode):
            WRAPPED[wrapper](model, {"plan": plan})(X.clone()).sum().backward()
        assert planned(model) == expected(Model, plan), wrapper


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrapper", [*WRAPPED, "blocks", "FSDP2(blocks)"])
def test_pattern_without_a_match_is_an_error_in_each_block(wrapper: str) -> None:
    def run(**settings: Any) -> list[str]:
        torch._dynamo.reset()
        model = Model()
        if wrapper in WRAPPED:
            return train(model, WRAPPED[wrapper](model, settings))
        every_block(model, **settings)
        return train(model, sharded(model) if wrapper == "FSDP2(blocks)" else model)

    typo = Plan("bf16", patterns=[("blocks.1", "int8"), ("blocks.2/lienar", "int8")])
    stranger = Plan("bf16", patterns=[("blocks.1", "int8"), ("blocks.9", "int8")])
    with pytest.raises(PlanError, match=r"blocks\.9"):
        run(plan=stranger)
    with pytest.raises(PlanError) as caught:
        run(plan=typo, strict=True)
    assert "blocks.2/lienar" in str(caught.value)


# Blocks.


def test_blocks_follow_the_plan_of_the_model() -> None:
    """The model is identified when it calls its block."""
    plan = PLANS["model"]
    model = Model()
    assert train(every_block(model, plan=plan, strict=True), model) == []
    assert planned(model) == {
        name: fmt for name, fmt in expected(Model, plan).items() if name.startswith("blocks")
    }
    assert {
        module.path: str(module.cause.why) for module in qsync_fx.plan_coverage(model).uncovered
    } == {
        "stem": "not given",
        "head": "not given",
    }
    replaced = Model()
    for index, block in enumerate(replaced.blocks):
        replaced.blocks[index] = compiled(block, plan=plan, strict=True)
    assert train(replaced, replaced) == []
    assert planned(replaced) == planned(model)


def test_rules_outside_the_blocks_are_reported() -> None:
    model = Model()
    (message,) = train(
        every_block(model, plan=Plan("bf16", patterns=[("blocks.0", "int8"), ("head", "int8")])),
        model,
    )
    assert "head (Linear): torch.compile was not given it" in message
    assert "stem" not in message, "the default precision applies only to compiled modules"


def test_blocks_with_a_root() -> None:
    plan = PLANS["model"]
    model = Model()
    for index, block in enumerate(model.blocks):
        block.compile(
            backend="qsync", options=options(plan=plan, root=f"blocks.{index}", strict=True)
        )
    assert train(model, model) == []
    wanted = {name: fmt for name, fmt in expected(Model, plan).items() if name.startswith("blocks")}
    assert planned(model) == wanted
    torch._dynamo.reset()
    alone = Block()
    fast = compiled(alone, plan=plan, root="blocks.1")
    messages = train(alone, fast)
    assert planned(alone) == {
        name: fmt for name, fmt in wanted.items() if name.startswith("blocks.1")
    }
    assert "the pattern 'head' (fp32) matches no operator" in messages[0], (
        "modules outside of the root are unknown"
    )


def test_block_with_the_root_of_another() -> None:
    model = Model()
    model.blocks[1].compile(backend="qsync", options=options(plan=PLANS["model"], root="blocks.0"))
    with pytest.raises(
        OptionError,
        match=r"is compiled as 'blocks\.0', and in Model, which calls it, it is 'blocks\.1'",
    ):
        model(X)


def test_model_in_a_user_wrapper_follows_its_plan() -> None:
    class Harness(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    plan, model = PLANS["model"], Model()
    assert train(model, Harness(compiled(model, plan=plan, strict=True))) == []
    assert planned(model) == expected(Model, plan)
    torch._dynamo.reset()
    outer = Plan("bf16", patterns=[(f"model.{pattern}", fmt) for pattern, fmt in plan.patterns])
    other = Model()
    harness = Harness(compiled(other, plan=outer, strict=True))
    assert train(harness, harness) == []
    assert planned(harness) == {f"model.{name}": fmt for name, fmt in expected(Model, plan).items()}
    torch._dynamo.reset()
    third = Model()
    with pytest.raises(PlanError, match="selects none"):
        Harness(compiled(third, plan=outer, root=""))(X)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "block",
    [
        sequential_block,
        pytest.param(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), marks=tiers.ALL),
    ],
)
def test_blocks_of_torch_classes(block: Callable[[], nn.Module]) -> None:
    """Dynamo compiles the forward of a torch class only if traced code, e.g. FSDP2's hooks, calls
    it.
    """
    for wrap in (lambda model: model, sharded):
        torch._dynamo.reset()
        model = Model(block)
        plan = Plan("bf16", patterns=[("blocks.2", "int8")])
        assert train(wrap(every_block(model, plan=plan, strict=True)), model) == []
        wanted = {
            name: fmt
            for name, fmt in expected(lambda: Model(block), plan).items()
            if name.startswith("blocks")
        }
        assert planned(model) == wanted
    sharded_model = Model(block)
    fast = compiled(sharded(sharded_model), plan=plan)
    assert "head (Linear)" in train(sharded_model, fast)[0]
    assert planned(sharded_model) == wanted


def test_a_sequential_compiled_in_place() -> None:
    model, plan = sequential(), PLANS["sequential"]
    model.compile(backend="qsync", options=options(plan=plan, strict=True))
    assert train(model, model) == []
    assert planned(model) == expected(sequential, plan)
