"""Command-line arguments for a model, its training, backend options and named files.

Invariant: an invalid reference raises `OptionError` that names its wrong part. Exceptions of the
user's module or function are not caught.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from qsync_fx import torch_internals as internals
from qsync_fx.cli.command import literal
from qsync_fx.cli.output import to_write
from qsync_fx.errors import OptionError, nearest, shown
from qsync_fx.option_help import DOCUMENTED, LISTS, RECIPE_HELP, SWITCHES

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from qsync_fx.diagnostics.explanation import Explanation
    from qsync_fx.options import Options
    from qsync_fx.predictor.replayer.cluster import Cluster


def named(value: Sequence[str], where: str, unnamed: str = "") -> dict[str, str]:
    """Return values by the name before "="; values without a name by `unnamed` and their index."""
    result: dict[str, str] = {}
    do = "write NAME=FILE once for each class of devices, or one FILE for all classes"
    for index, text in enumerate(value):
        name, equals, path = text.partition("=")
        # A path may contain "=": a name contains no "/".
        if not equals or "/" in name:
            name, path = unnamed.format(index), text
        if name in result:
            message = f"the name {shown(name)} occurs twice"
            raise OptionError(
                message if name else "several values have no name", where=where, do=do
            )
        result[name] = path
    if "" in result and len(result) > 1:
        raise OptionError("one value has no name, but others have", where=where, do=do)
    return result


_REFERENCE_FORMAT = 'write MODULE:CALLABLE, such as "examples.bert:small"'
_RETURN_FORMAT = (
    "return (model, args) or (model, args, kwargs) with a tuple args and a dictionary kwargs"
)

Referred = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def existing_reference(reference: str) -> str:
    """Return a reference whose top-level module exists; for `add_argument(type=...)`.

    This check precedes the import of torch.
    """
    module, _ = _parts(reference)
    top = module.partition(".")[0]
    _search_current_folder()
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _missing(top, reference)
    return reference


def load(reference: str) -> Referred:
    """Call the function MODULE:CALLABLE, and return the model and its inputs."""
    module_name, path = _parts(reference)
    _search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A failed import inside an existing module is shown to the user with its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _missing(error.name, reference) from None
    factory = _attribute(module, path, reference)
    _check_call(factory, reference)
    return _checked(factory(), reference)


def _parts(reference: str) -> tuple[str, str]:
    module, colon, name = reference.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").replace("/", ".").strip(".")
        raise OptionError(
            f"{shown(module)} is a path, not a module", do=f'write "{dotted}:{name or "CALLABLE"}"'
        )
    if not colon or "" in (*module.split("."), *name.split(".")):
        raise OptionError(f"{shown(reference)} does not name a model", do=_REFERENCE_FORMAT)
    return module, name


def _search_current_folder() -> None:
    current = os.getcwd()
    if current not in sys.path:
        sys.path.insert(0, current)


def _missing(module: str, reference: str) -> OptionError:
    return OptionError(
        f"there is no module {shown(module)}",
        where=reference,
        do=f"run qsync in the folder of the module (this folder is {os.getcwd()}), or install "
        "its package",
    )


def _attribute(value: Any, path: str, reference: str) -> Any:
    for name in path.split("."):
        if not hasattr(value, name):
            public = (key for key in vars(value) if not key.startswith("_"))
            do = nearest(name, [key for key in public if callable(getattr(value, key, None))])
            owner = getattr(value, "__name__", type(value).__name__)
            raise OptionError(f"{owner} has no {shown(name)}", where=reference, do=do)
        value = getattr(value, name)
    return value


def _check_call(factory: Any, reference: str) -> None:
    if not callable(factory):
        raise OptionError(
            f"a value of type {type(factory).__name__} cannot be called",
            where=reference,
            do=f"name a function; {_RETURN_FORMAT}",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(
            f"the function cannot be called without arguments: {error}",
            where=reference,
            do="give all its parameters defaults, or name a function without parameters",
        ) from None
    except ValueError:
        # Some callables written in C have no signature; the call shows whether it works.
        return


def _checked(result: Any, reference: str) -> Referred:
    model: Any = None
    args: Any = ()
    kwargs: Any = {}
    message, do = "", _RETURN_FORMAT
    if not isinstance(result, tuple):
        message = f"the function returned a value of type {type(result).__name__}"
    elif len(result) not in (2, 3):
        message = f"the function returned a tuple of {len(result)}"
    else:
        model, args, kwargs = (*result, {})[:3]
        if not callable(model):
            message = f"the model is of type {type(model).__name__}, which cannot be called"
            do = "return a torch.nn.Module or a function as the model"
        elif not isinstance(args, Sequence) or isinstance(args, str):
            message = f"args is of type {type(args).__name__}, not a tuple"
            do = "return (model, (x,)) for one input, or (model, (), kwargs) for none"
        elif not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            message = "kwargs is not a dictionary with string keys"
    if message:
        raise OptionError(message, where=reference, do=do)
    return model, tuple(args), dict(kwargs)


_REFERENCE = """\
MODULE:CALLABLE names a function without arguments that returns (model, args)
or (model, args, kwargs) for the call model(*args, **kwargs). MODULE is searched
as by "python -m": in the current folder and installed packages. Example, bert.py:

    def small():
        config = transformers.BertConfig(num_hidden_layers=2)
        inputs = {"input_ids": torch.randint(0, 1000, (8, 128))}
        return transformers.BertModel(config), (), inputs

The model runs once on these inputs, to find graph breaks. Its parameters and
buffers do not change."""

_RUN_OPTIONS = ("inner_backend", "cached_plan", "strict")
_CLI_HELP = {
    "plan": "path of a saved plan instead of --precision; from a plan for a cluster, the part for "
    "--device-class is used",
    "passes": "also run this pass of an installed package; repeatable",
    "fast_dropout": "draw dropout masks on the CPU in vectors from the stream of random numbers "
    "for rounding, and report where this is not possible; --no-fast-dropout uses torch's generator",
}
"""Help of options that differ from Python."""
_FLAGS = {"passes": "--pass"}
_METAVARS = {
    "precision": "NAME",
    "plan": "FILE",
    "device_class": "NAME",
    "root": "PATH",
    "target": "GPU",
    "passes": "NAME",
    "scaling": "GRANULARITY",
    "memory_budget": "SHARE",
}


EVERY_FORMAT = OptionError(
    "a measurement runs operators in every format to find the faster ones",
    where="--skip-unprofitable",
    do="remove it; plans made from the profile avoid formats that do not pay",
)
"""Refusal of --skip-unprofitable by commands that measure."""


def add(
    parser: argparse.ArgumentParser,
    name: str = "model",
    *,
    inspection: bool = False,
    required: bool = True,
    used: Collection[str] | None = None,
    refused: Mapping[str, OptionError] = MappingProxyType({}),
) -> None:
    """Add the arguments for a model and the options of the backend.

    Args:
        name: name of the argument for the model; "--model" makes it optional.
        inspection: also add --train, --eval and --target, for commands that only inspect a model.
        used: options of the backend that the command uses; None for all.
        refused: specific errors for options that the command does not use. They are raised while
            arguments are parsed, and --help does not list these options.
    """
    reference = parser.add_argument_group("the model", _REFERENCE)
    text = "function that returns (model, args) or (model, args, kwargs)"
    model = reference.add_argument(
        name, metavar="MODULE:CALLABLE", type=existing_reference, help=text
    )
    if not required:
        model.nargs, model.required = "?", False
    parser.set_defaults(mode=None, inspection=inspection)
    if inspection:
        mode = reference.add_mutually_exclusive_group()
        modes = {
            "train": "call model.train() first",
            "eval": "call model.eval() first, and disable gradients",
        }
        for value, text in modes.items():
            mode.add_argument(
                f"--{value}", dest="mode", action="store_const", const=value, help=text
            )
    options = parser.add_argument_group("options of the backend")
    for option, settings in _arguments(inspection).items():
        error = refused.get(option)
        if error is None and used is not None and option not in used:
            error = OptionError(
                f"the command does not use {flag(option)}", where=flag(option), do="remove it"
            )
        if error is not None:
            settings = {"action": _refusing(error), "nargs": "?", "help": argparse.SUPPRESS}
        options.add_argument(flag(option), dest=option, **settings)


def _refusing(error: OptionError) -> type[argparse.Action]:
    class Refusal(argparse.Action):
        def __call__(self, *_: object) -> NoReturn:
            raise error

    return Refusal


def flag(option: str) -> str:
    """Return the command-line flag of a backend option."""
    return _FLAGS.get(option, f"--{option.replace('_', '-')}")


def explicit_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options and the recipe that a command line sets, by name."""
    # Of `qsync plan`, --target is the limit of the step time.
    names = _arguments(getattr(arguments, "inspection", False))
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def measured(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options for measurements of several plans, each of which is of one device."""
    options = explicit_options(arguments) | {"skip_unprofitable": None}  # which a recipe may set
    return {name: value for name, value in options.items() if name not in ("plan", "device_class")}


def _arguments(inspection: bool) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {
        "recipe": {"help": literal(RECIPE_HELP), "metavar": "NAME"}
    }
    for name, text in DOCUMENTED.items():
        if name in _RUN_OPTIONS or (name == "target" and not inspection):
            continue
        text = text.removeprefix("True: ").removesuffix("; False by default")
        help_text = literal(_CLI_HELP.get(name, text))
        metavar = {"metavar": _METAVARS.get(name, "MODE")}
        if name in ("fast_dropout", "skip_unprofitable"):  # by default neither on nor off
            result[name] = {"action": argparse.BooleanOptionalAction, "help": help_text}
        elif name in SWITCHES:
            result[name] = {"action": "store_true", "default": None, "help": help_text}
        elif name in LISTS:
            result[name] = {"action": "append", "help": help_text} | metavar
        else:
            result[name] = {"help": help_text} | metavar
    result["memory_budget"]["type"] = float
    return result


@dataclass(frozen=True)
class ModelArguments:
    """Model that a command line names, with its inputs and options."""

    reference: str
    options: Options
    mode: str | None
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Device of the first parameter; the CPU without parameters."""
        import torch

        if isinstance(self.model, torch.nn.Module):
            for parameter in self.model.parameters():
                return parameter.device
        return torch.device("cpu")

    def on(self, device: torch.device) -> ModelArguments:
        """Return the same arguments with tensors on `device`; a module is moved in place."""
        import torch

        if not isinstance(self.model, torch.nn.Module):
            return self
        self.model.to(device)
        args, kwargs = internals.tree_map_only(
            torch.Tensor, lambda t: t.to(device), (self.args, self.kwargs)
        )
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def explain(self) -> Explanation:
        """Return the effects of the backend on the model; raise `QSyncError` if it has no graph."""
        import torch

        from qsync_fx.diagnostics.explain_model import explain
        from qsync_fx.errors import QSyncError

        if self.mode is not None and isinstance(self.model, torch.nn.Module):
            self.model.train(self.mode == "train")
        with torch.set_grad_enabled(self.mode != "eval" and torch.is_grad_enabled()):
            explanation = explain(self.model, *self.args, options=self.options, **self.kwargs)
        if not explanation.graphs:
            raise QSyncError(
                "torch.compile captured no graph of the model",
                where=self.reference,
                do="return a model that computes with tensors",
            )
        return explanation


def read(arguments: argparse.Namespace) -> ModelArguments:
    """Return the model of a command line; options are checked before it is built."""
    from qsync_fx.options import Options

    options = Options.parse(explicit_options(arguments))
    return ModelArguments(arguments.model, options, arguments.mode, *load(arguments.model))


LOSS = """\
The loss is the .loss of the model's output, or the output itself if it is one
scalar; otherwise it is the sum of the mean squares of all outputs."""


@dataclass(frozen=True)
class Trained:
    """Model that a command line names, in the form that `measure` and `sensitivity` accept.

    `precisions` are names of formats; None for the formats with a native unit on the device.
    """

    arguments: ModelArguments
    module: Any
    step: Callable[[Any, Any], Tensor]
    batches: list[Any]
    precisions: list[str] | None


def add_training(
    parser: argparse.ArgumentParser,
    title: str,
    precisions: str,
    noun: str,
    *,
    required: bool = True,
    refused: Mapping[str, OptionError] = MappingProxyType({}),
) -> argparse._ArgumentGroup:
    """Add the model's arguments as `add` does, and return a new group with --precisions.

    Args:
        precisions: help text of --precisions.
        noun: result of the command, such as "a profile", for the error about --precision.
    """
    one_precision = OptionError(
        f"{noun} covers several precisions", where="--precision", do="use --precisions instead"
    )
    add(parser, required=required, refused={"precision": one_precision, **refused})
    group = parser.add_argument_group(title)
    group.add_argument("--precisions", metavar="NAMES", type=names, help=precisions)
    return group


def add_output(parser: argparse.ArgumentParser, output: str, json: str) -> None:
    """Add --output and --json with these help texts."""
    saved = parser.add_argument_group("output")
    saved.add_argument("--output", metavar="FILE", type=to_write, help=output)
    saved.add_argument("--json", action="store_true", help=json)


def read_training(arguments: argparse.Namespace) -> Trained:
    """Return the model that a command line names, with its step and its batch."""
    import torch

    # A resumed measurement needs the same weights.
    torch.manual_seed(0)
    value = read(arguments)
    if not hasattr(value.model, "parameters"):
        raise OptionError(
            "the model is a function without parameters, which cannot be trained",
            where=value.reference,
            do="return a torch.nn.Module",
        )
    module: Any = value.model
    return Trained(
        value,
        module.train(),
        lambda trained, inputs: loss_of(trained(*inputs[0], **inputs[1]), value.reference),
        [(value.args, value.kwargs)],
        arguments.precisions,
    )


def loss_of(result: Any, reference: str) -> Tensor:
    """Return the loss: `.loss`, or a single scalar output, or the sum of mean squares.

    The sum is over all output tensors that require gradients.
    """
    import torch

    if isinstance(loss := getattr(result, "loss", None), torch.Tensor):
        return loss
    matches = [
        t for t in internals.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not matches:
        raise OptionError(
            "no output of the model requires gradients",
            where=reference,
            do="return a model whose outputs require gradients",
        )
    if len(matches) == 1 and not matches[0].dim():
        return matches[0]
    return torch.stack([t.float().square().mean() for t in matches]).sum()


def cluster(path: str) -> Cluster:
    """Read a cluster by path or name; for `add_argument(type=...)`, before torch is imported."""
    from qsync_fx.predictor.replayer.cluster import Cluster

    return Cluster.load(path)


def names(text: str) -> list[str]:
    """Return comma-separated names; for `add_argument(type=...)`."""
    return text.split(",")


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    text = "class of torch.optim in lower case, or none; adamw by default"
    group.add_argument("--optimizer", metavar="NAME", default="adamw", help=text)


def optimizer(name: str, module: Any) -> Optimizer | None:
    """Return the optimizer that --optimizer names; raise `OptionError` if torch has none."""
    import torch

    if name == "none":
        return None
    base = torch.optim.Optimizer
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    classes: dict[str, Any] = {
        kind.__name__.lower(): kind for kind in kinds if issubclass(kind, base) and kind is not base
    }
    if name not in classes:
        do = nearest(name, ["none", *classes])
        raise OptionError(f"torch.optim has no optimizer {name!r}", where="--optimizer", do=do)
    result: Optimizer = classes[name](module.parameters(), lr=1e-3)
    return result
