"""The options of the backend: `torch.compile(model, backend="qsync", options={...})`.

An option that is silently ignored costs a training run, so whatever is not understood raises before anything is compiled, and names
what was probably meant. Invariant: an `Options` that exists is valid, and says what `DOCUMENTED` documents, option for option. Equal
options compile to the same code.

The plan that a set of options means on a device.

Invariant: there is always one. Options with neither a plan nor a precision mean what runs best on the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from qsync_fx.devices.format_support import default_precision
from qsync_fx.devices.target_override import TARGETS
from qsync_fx.errors import OptionError, nearest, shown
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.option_help import DOCUMENTED as DOCUMENTED
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.plan_loading import HoldsPlan, part_of_this_process, read_plan
from qsync_fx.rounding import ROUNDINGS, Rounding
from qsync_fx.serialization.strict_json import kind

Inner = Literal["inductor", "aot_eager", "eager"]
GradientRounding = Literal["nearest", "stochastic"]
Scaling = Literal["tensor", "channel"]

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inner": get_args(Inner),
        "rounding": ROUNDINGS,
        "gradient_rounding": get_args(GradientRounding),
        "scaling": get_args(Scaling),
    }
)


@dataclass(frozen=True)
class Options:
    """Options of one compilation, as `DOCUMENTED` explains them; raises `OptionError` for a value that an option cannot take.

    With neither `precision` nor `plan` the caller decides by the device.
    """

    precision: str | None = None
    plan: Plan | None = None
    device_class: str | None = field(default=None, compare=False)
    inner: Inner = "inductor"
    rounding: Rounding = "stochastic"
    gradient_rounding: GradientRounding = "nearest"
    scaling: Scaling = "tensor"
    exact: bool = False
    where_faster: bool = False
    fast_dropout: bool | None = None
    cudagraphs: bool = False
    keep_less: bool = False
    weights_once: bool = False
    cached_plan: bool = True
    strict: bool = False
    root: str | None = None
    target: str | None = None
    passes: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.precision is not None:
            _one_of("precision", self.precision, FORMATS)
        if self.target is not None:
            _one_of("target", self.target, TARGETS)
        if self.device_class is not None and not isinstance(self.device_class, str):
            raise _wrong("device_class", self.device_class, 'give a name such as "t4"')
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise _wrong("plan", self.plan, "give a Plan or a path; Plan.uniform and Plan(operators={...}) make one")
        for name, choices in _CHOICES.items():
            _one_of(name, getattr(self, name), choices)
        for name in (item.name for item in fields(self) if isinstance(item.default, bool)):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "give True or False")
        if self.fast_dropout is not None and not isinstance(self.fast_dropout, bool):
            raise _wrong("fast_dropout", self.fast_dropout, "give True or False, or leave it out")
        for name, why, who in (
            ("fast_dropout", "takes no dropout of ours", "draws in vectors"),
            ("cudagraphs", "captures nothing", "captures CUDA graphs"),
            ("keep_less", "keeps what autograd keeps", "chooses what is kept"),
        ):
            if getattr(self, name) and self.inner != "inductor":
                raise OptionError(
                    f'"{name}" is given with "inner": "{self.inner}", which {why}',
                    where=f'options "{name}" and "inner"',
                    do=f'drop one of them: the inner compiler that {who} is "inductor"',
                )
        if self.exact and self.where_faster:
            raise OptionError(
                '"exact" keeps every format that is planned, and "where_faster" those alone that are faster',
                where='options "exact" and "where_faster"',
                do="drop one of them",
            )
        if self.root is not None and (not isinstance(self.root, str) or (self.root and "" in self.root.split("."))):
            raise _wrong("root", self.root, 'give a path such as "encoder.layer.0"; "" says that it is the whole model')
        if not isinstance(self.passes, tuple):
            raise _wrong("passes", self.passes, "give a list, also for one pass: [my_pass]")
        if self.precision is not None and self.plan is not None:
            raise OptionError(
                "precision and plan are both given, and each decides on every operator",
                where='options "precision" and "plan"',
                do=f'drop "precision" to train by the plan, which plan.with_precision(pattern, {self.precision!r}) can change; '
                f'or drop "plan" for {self.precision} everywhere, which is Plan.uniform({self.precision!r})',
            )

    @property
    def automatic(self) -> bool:
        """Whether the user asked for neither a plan nor a precision."""
        return self.precision is None and self.plan is None

    @property
    def beside_plan(self) -> str:
        """What is asked beside a plan and a precision, in words: options that are not as by default, and change what is computed."""
        requested = [
            f for f in fields(self) if f.compare and f.name not in ("precision", "plan", "cached_plan", "strict")
        ]
        values = {f.name: getattr(self, f.name) for f in requested if getattr(self, f.name) != f.default}
        return ", ".join(f"{name}={_in_words(value)}" for name, value in values.items())

    @classmethod
    def parse(cls, mapping: Mapping[str, object] | Options | None) -> Options:
        """Returns the options in a mapping, as users write them.

        A plan may be given as the path of its file, and for a cluster, of which this rank's part is taken; a precision as `Precision`,
        passes as a list. Options that were parsed before stay as they are: a file is read once.

        Raises:
            OptionError: an unknown option, a value it cannot take, or both a precision and a plan.
            PlanError: a plan file that cannot be read, or a plan for a cluster of which this rank's part cannot be told.
        """
        if mapping is None:
            return cls()
        if isinstance(mapping, cls):
            return mapping
        if not isinstance(mapping, Mapping):
            raise OptionError(
                f"options are a dictionary, not {kind(mapping)}", do='write options={"precision": "int8"}'
            )
        for name in mapping:
            if name not in DOCUMENTED:
                message = shown(name) if isinstance(name, str) else kind(name)
                raise OptionError(
                    f"there is no option {message}", where="options", do=nearest(str(name)[:40], DOCUMENTED)
                )
        result = {name: _converted(name, value) for name, value in mapping.items()}
        device_class = result.get("device_class")
        if isinstance(result.get("plan"), Plan | ClusterPlan) and isinstance(device_class, str | None):
            result["plan"] = part_of_this_process(result["plan"], device_class)
        return cls(**result)


def _converted(name: str, value: object) -> Any:
    """Returns the value of an option as its field keeps it, where users may write it in another way."""
    match name, value:
        case "plan", str() | os.PathLike():
            return read_plan(value)
        case "plan", HoldsPlan():
            return value.as_plan()
        case "precision", Precision():
            return value.name
        case "passes", list():
            return tuple(value)
        case _:
            return value


def _in_words(value: object) -> str:
    """Returns what a value is called in every process: passes have names."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_in_words, value))}]"
    return str(value if isinstance(value, (str, bool)) else getattr(value, "name", type(value).__name__))


def _one_of(name: str, value: object, available: Iterable[str]) -> None:
    if not isinstance(value, str):
        raise _wrong(name, value, nearest("", available))
    if value not in available:
        raise _wrong(name, value, nearest(value[:40], available))


def _wrong(name: str, value: object, do: str) -> OptionError:
    inputs = shown(value) if isinstance(value, str) else kind(value)
    return OptionError(f'the option "{name}" cannot be {inputs}', where=f'option "{name}": {DOCUMENTED[name]}', do=do)


def plan_in_force(options: Options, device: torch.device) -> Plan:
    """Returns the user's plan, or the uniform one that the options ask for."""
    if options.plan is not None:
        return options.plan
    return Plan.uniform(options.precision or default_precision(device).name)
