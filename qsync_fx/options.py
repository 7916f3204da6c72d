"""Options of the backend: `torch.compile(model, backend="qsync", options={...})`.

A silently ignored option costs a training run. Therefore an unknown option or value raises before
compilation, with the closest valid name. Invariant: every `Options` object is valid, and equal
options compile to the same code.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from qsync_fx.devices.device_catalog import canonical
from qsync_fx.devices.format_support import TARGETS, default_precision
from qsync_fx.errors import OptionError, PrecisionError, nearest
from qsync_fx.formats import FORMATS, Precision, precision
from qsync_fx.option_help import DOCUMENTED as DOCUMENTED, RECIPE_HELP, RECIPES
from qsync_fx.plan.cluster_plan import (
    ClusterPlan,
    given_plan,
    memory_budget,
    part_of_this_process,
    read_plan,
)
from qsync_fx.plan.plan import Plan
from qsync_fx.rounding import ROUNDINGS, Rounding
from qsync_fx.serialization.strict_json import kind, shown_value

InnerBackend = Literal["inductor", "aot_eager", "eager"]
GradientRounding = Literal["nearest", "stochastic"]
Scaling = Literal["tensor", "channel"]

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inner_backend": get_args(InnerBackend),
        "rounding": ROUNDINGS,
        "gradient_rounding": get_args(GradientRounding),
        "scaling": get_args(Scaling),
    }
)


@dataclass(frozen=True)
class Options:
    """Options of one compilation.

    `torch.compile(model, backend="qsync", options=qsync_fx.Options(precision="int8"))` and a
    dictionary with the same names are equivalent. Without `precision` and `plan` the device
    determines the precision.

    Attributes:
        precision: format of every operator, such as "int8"; excludes `plan`.
        plan: format of each operator.
        device_class: class of this rank's device in a cluster plan; None to detect it.
        inner_backend: compiler of the rewritten graph, "inductor", "aot_eager" or "eager".
        rounding: of values to INT8 and FP8, "stochastic", "nearest" or "floor".
        gradient_rounding: of gradients to BF16 and FP16, "nearest" or "stochastic".
        scaling: one scale per "tensor" or per "channel".
        emulate_unsupported: emulate unsupported formats exactly instead of substituting them.
        skip_unprofitable: use a wider format for operators that the uniform precision does not make
            faster; None to do so on GPUs if `precision` is given.
        fast_dropout: draw dropout masks in vectors on the CPU; None to do so if possible.
        cudagraphs: capture steps in CUDA graphs.
        activation_recompute: recompute inexpensive activations in backward instead of saving them.
        memory_budget: share of the saved activations that stay saved, from 0 (all are recomputed
            that may be) to 1 (all are saved); None for the budget of the plan, or else torch's.
        cache_quantized_weights: quantize a weight once per step; requires that all writes go
            through torch.
        cached_plan: use the plan of a cached profile if neither `precision` nor `plan` is given.
        strict: raise instead of warn if a part of the plan is not applied.
        root: path of the compiled module in the model of the plan; None to detect it.
        target: GPU to inspect graphs for, which need not be present.
        passes: custom passes, in order of execution.

    Raises:
        OptionError: an option has an invalid value, or options exclude each other.
    """

    precision: str | None = None
    plan: Plan | None = None
    device_class: str | None = field(default=None, compare=False)
    inner_backend: InnerBackend = "inductor"
    rounding: Rounding = "stochastic"
    gradient_rounding: GradientRounding = "nearest"
    scaling: Scaling = "tensor"
    emulate_unsupported: bool = False
    skip_unprofitable: bool | None = None
    fast_dropout: bool | None = None
    cudagraphs: bool = False
    activation_recompute: bool = False
    memory_budget: float | None = None
    cache_quantized_weights: bool = False
    cached_plan: bool = True
    strict: bool = False
    root: str | None = None
    target: str | None = None
    passes: tuple[Any, ...] = ()
    # `memory_budget`, or else the budget of the plan, if any: equal options have equal budgets.
    active_memory_budget: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("precision", "plan", "passes"):
            object.__setattr__(self, name, _converted(name, getattr(self, name)))
        if self.precision is not None:
            _one_of("precision", self.precision, FORMATS)
        if self.target is not None:
            _one_of("target", self.target, TARGETS)
            object.__setattr__(self, "target", canonical(self.target) or self.target)
        if self.device_class is not None and not isinstance(self.device_class, str):
            raise _wrong("device_class", self.device_class, 'use a name such as "t4"')
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise _wrong(
                "plan",
                self.plan,
                'pass a Plan, a path, or a dictionary such as {"default": "int8", "head": "fp32"}',
            )
        for name, choices in _CHOICES.items():
            _one_of(name, getattr(self, name), choices)
        for name in (item.name for item in fields(self) if isinstance(item.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "use True or False")
        for name in ("fast_dropout", "skip_unprofitable"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(name, getattr(self, name), "use True or False, or remove it")
        self._check_memory_budget()
        for name in ("fast_dropout", "cudagraphs", "activation_recompute"):
            if getattr(self, name) and self.inner_backend != "inductor":
                raise OptionError(
                    f'"{name}" requires "inner_backend": "inductor", not "{self.inner_backend}"',
                    where=f'options "{name}" and "inner_backend"',
                    do="remove one of them",
                )
        if self.emulate_unsupported and self.skip_unprofitable:
            raise OptionError(
                '"emulate_unsupported" runs every planned format, but "skip_unprofitable" only '
                "formats that are faster",
                where='options "emulate_unsupported" and "skip_unprofitable"',
                do="remove one of them",
            )
        root: object = "" if self.root is None else self.root
        if not isinstance(root, str) or (root and "" in root.split(".")):
            do = 'use a path such as "encoder.layer.0"; "" is the full model'
            raise _wrong("root", root, do)
        if not isinstance(self.passes, tuple):
            raise _wrong("passes", self.passes, "use a list of passes, such as [my_pass]")
        if self.precision is not None and self.plan is not None:
            raise OptionError(
                '"precision" and "plan" are both set, but each defines the precision of every '
                "operator",
                where='options "precision" and "plan"',
                do='remove "precision" to train with the plan, which '
                f"plan.with_precision(pattern, {self.precision!r}) can change; or remove "
                f'"plan" to train every operator in {self.precision}',
            )

    def _check_memory_budget(self) -> None:
        budget: object = self.memory_budget
        do = "remove one of them"
        if budget is None and self.plan is not None:
            budget = memory_budget(self.plan.notes)
            do = 'remove the other option, or add "memory_budget": 1 to save all activations'
        elif budget is not None:
            if isinstance(budget, bool) or not isinstance(budget, int | float):
                budget = math.nan
            if not 0 <= budget <= 1:
                raise _wrong(
                    "memory_budget", self.memory_budget, "use a number from 0 to 1, such as 0.5"
                )
            budget = float(budget)
            object.__setattr__(self, "memory_budget", budget)
        object.__setattr__(self, "active_memory_budget", budget)
        if budget in (None, 1):
            return
        subject = '"memory_budget"'
        if self.memory_budget is None:
            subject = f"the memory budget {budget} of the plan"
        for name, value in (("inner_backend", "eager"), ("activation_recompute", True)):
            if getattr(self, name) == value:
                raise OptionError(
                    f'{subject} cannot be combined with "{name}": {value!r}, which selects '
                    "the saved tensors itself",
                    where=f'options "memory_budget" and "{name}"',
                    do=do,
                )

    @property
    def is_default(self) -> bool:
        """Whether the user gave neither a plan nor a precision."""
        return self.precision is None and self.plan is None

    @property
    def non_default_options(self) -> str:
        """Changed options that affect numbers, except precision and plan: "scaling=channel"."""
        excluded = ("precision", "plan", "cached_plan", "strict")
        changed = (
            (item.name, getattr(self, item.name))
            for item in fields(self)
            if item.init and item.compare and item.name not in excluded
            if getattr(self, item.name) != item.default
        )
        return ", ".join(f"{name}={_in_words(value)}" for name, value in changed)

    @classmethod
    def from_recipe(cls, name: str, **options: object) -> Options:
        """Return the options of a recipe of `qsync_fx.option_help.RECIPES`.

        Args:
            options: as of `parse`; they override those of the recipe.

        Raises:
            OptionError: the recipe does not exist, or an option is invalid.
        """
        return cls.parse({"recipe": name, **options})

    @classmethod
    def parse(cls, mapping: Mapping[str, object] | Options | None) -> Options:
        """Return the options in a mapping, as users write them.

        A plan may be the path of its file, a cluster plan, from which the part of this rank is
        selected, or a dictionary from patterns to formats, in which "default" is the format of all
        other operators. A precision may be a `Precision`, a dtype or a name in any case, and passes
        may be a list or a single pass. "recipe" adds the options of a recipe, which other entries
        of the mapping override. An `Options` object is returned unchanged, so a plan file is read
        once.

        Raises:
            OptionError: an option is unknown or has an invalid value, or both precision and plan
                are given.
            PlanError: a plan file cannot be read, or a cluster plan has no part for this rank.
        """
        if mapping is None:
            return cls()
        if isinstance(mapping, cls):
            return mapping
        if not isinstance(mapping, Mapping):
            raise OptionError(
                f"options must be a dictionary, not {kind(mapping)}",
                do='write options={"precision": "int8"}',
            )
        if "recipe" in mapping:
            mapping = _with_recipe(mapping)
        for name in mapping:
            if name not in DOCUMENTED:
                do = nearest(str(name)[:40], ("recipe", *DOCUMENTED))
                raise OptionError(f"unknown option {shown_value(name)}", where="options", do=do)
        result = {name: _converted(name, value) for name, value in mapping.items()}
        plan, device_class = result.get("plan"), result.get("device_class")
        if isinstance(plan, Plan | ClusterPlan) and isinstance(device_class, str | None):
            result["plan"] = part_of_this_process(plan, device_class)
        return cls(**result)


def _with_recipe(mapping: Mapping[str, object]) -> dict[str, object]:
    explicit = {name: value for name, value in mapping.items() if name != "recipe"}
    _one_of("recipe", mapping["recipe"], RECIPES)
    recipe = dict(RECIPES[str(mapping["recipe"])].options)
    if explicit.get("plan") is not None:
        del recipe["precision"]
    return {**recipe, **explicit}


def _converted(name: str, value: object) -> Any:
    match name, value:
        case "plan", str() | os.PathLike():
            return read_plan(value)
        case "plan", _:
            return given_plan(value)
        case "precision", Precision() | torch.dtype() | str():
            # An unknown name stays, for the error about the option.
            with contextlib.suppress(PrecisionError):
                return precision(value).name
            return value
        case "passes", list():
            return tuple(value)
        case "passes", _ if isinstance(value, str) or (callable(value) and hasattr(value, "name")):
            return (value,)
        case _:
            return value


def _in_words(value: object) -> str:
    """Return a text of a value that is equal in all processes; passes are named."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, str | bool | int | float):
        return str(value)
    return str(getattr(value, "name", type(value).__name__))


def _one_of(name: str, value: object, available: Iterable[str]) -> None:
    if not isinstance(value, str):
        raise _wrong(name, value, nearest("", available))
    if value not in available:
        raise _wrong(name, value, nearest(value[:40], available))


def _wrong(name: str, value: object, do: str) -> OptionError:
    where = f'option "{name}": {DOCUMENTED.get(name, RECIPE_HELP)}'
    return OptionError(f'the option "{name}" cannot be {shown_value(value)}', where=where, do=do)


def active_plan(options: Options, device: torch.device) -> Plan:
    """Return the user's plan, or the uniform plan of the requested or default precision."""
    if options.plan is not None:
        return options.plan
    return Plan.uniform(options.precision or default_precision(device).name)
