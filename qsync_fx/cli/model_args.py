"""Command-line arguments for a model, backend options and named files.

`add` and `read` define the arguments that all verbs with a model share. Backend options are derived
from `qsync_fx.option_help.DOCUMENTED`, except options that only affect training runs. `load`
resolves a model reference "package.module:function". `named` parses NAME=VALUE arguments for
classes of devices.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from qsync_fx.cli.command import literal
from qsync_fx.errors import OptionError, nearest, shown
from qsync_fx.option_help import DOCUMENTED, LISTS, RECIPE_HELP, SWITCHES

if TYPE_CHECKING:
    import torch

    from qsync_fx.diagnostics.explanation import Explanation
    from qsync_fx.options import Options


def named(value: Sequence[str], where: str, unnamed: str = "") -> dict[str, str]:
    """Return values by the name before "="; values without a name by `unnamed` and their index.

    Either one value has no name and applies to all classes, or each has a unique name.
    """
    result: dict[str, str] = {}
    for index, text in enumerate(value):
        name, equals, path = text.partition("=")
        # A path may contain "=": a name contains no "/".
        name, path = (name, path) if equals and "/" not in name else (unnamed.format(index), text)
        if name in result:
            message = (
                f"{shown(name)} is given twice" if name else "there are several without a name"
            )
            raise OptionError(
                message,
                where=where,
                do="write NAME=FILE, with each name of the cluster's devices once",
            )
        result[name] = path
    if "" in result and len(result) > 1:
        raise OptionError(
            "some have a name and one has none",
            where=where,
            do="name all of them, or give one for all",
        )
    return result


_HOW_TO_WRITE_IT = 'write MODULE:CALLABLE, such as "examples.bert:small"'
_WHAT_TO_RETURN = (
    "return (model, args) or (model, args, kwargs), args a tuple and kwargs a dictionary"
)

Referred = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def findable(reference: str) -> str:
    """Return a reference whose top-level module exists; for `add_argument(type=...)`.

    This check precedes the import of torch.

    Raises:
        OptionError: it does not name a module and a callable, or the module does not exist.
    """
    module, _ = _parts(reference)
    top = module.partition(".")[0]
    _look_here_first()
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _missing(top, reference)
    return reference


def load(reference: str) -> Referred:
    """Call the function at `reference`, and return the model and its inputs.

    Args:
        reference: "MODULE:CALLABLE"; the current folder is searched first, as by "python -m".

    Raises:
        OptionError: the module or callable does not exist, it requires arguments, or its result has
            the wrong type.
    """
    module, name = _parts(reference)
    factory = _attribute(_module(module, reference), name, reference)
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
        raise OptionError(f"{shown(reference)} does not name a model", do=_HOW_TO_WRITE_IT)
    return module, name


def _module(name: str, reference: str) -> Any:
    _look_here_first()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A failed import inside an existing module is shown to the user with its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _missing(error.name, reference) from None


def _look_here_first() -> None:
    current = os.getcwd()
    if current not in sys.path:
        sys.path.insert(0, current)


def _missing(module: str, reference: str) -> OptionError:
    return OptionError(
        f"there is no module {shown(module)}",
        where=reference,
        do=f"run qsync in the folder that holds it (this is {os.getcwd()}), or install its package",
    )


def _attribute(value: Any, path: str, reference: str) -> Any:
    for name in path.split("."):
        if not hasattr(value, name):
            available = [
                key
                for key in vars(value)
                if not key.startswith("_") and callable(getattr(value, key, None))
            ]
            owner = getattr(value, "__name__", type(value).__name__)
            raise OptionError(
                f"{owner} has no {shown(name)}", where=reference, do=nearest(name, available)
            )
        value = getattr(value, name)
    return value


def _check_call(factory: Any, reference: str) -> None:
    if not callable(factory):
        raise OptionError(
            f"it is a value of type {type(factory).__name__}, which cannot be called",
            where=reference,
            do=f"name a function; {_WHAT_TO_RETURN}",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise OptionError(
            f"the function cannot be called without arguments: {error}",
            where=reference,
            do="give its parameters defaults, or name a function that calls it",
        ) from None
    except ValueError:
        # Some callables written in C have no signature; the call shows whether it works.
        return


def _checked(result: Any, reference: str) -> Referred:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        message = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a value of type {type(result).__name__}"
        )
        raise OptionError(f"the function returned {message}", where=reference, do=_WHAT_TO_RETURN)
    model, args, kwargs = (*result, {})[:3]
    if not callable(model):
        raise OptionError(
            f"the model is of type {type(model).__name__}",
            where=reference,
            do="return a module or function",
        )
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise OptionError(
            f"args is of type {type(args).__name__}, not a tuple",
            where=reference,
            do="for one input write (model, (x,)), with a comma; for none (model, (), kwargs)",
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise OptionError(
            "kwargs is not a dictionary of names", where=reference, do=_WHAT_TO_RETURN
        )
    return model, tuple(args), dict(kwargs)


_REFERENCE = """\
MODULE:CALLABLE names a function without arguments that returns (model, args)
or (model, args, kwargs), as you would call model(*args, **kwargs). MODULE is
found as by "python -m": in the current folder, or installed. As in bert.py:

    def small():
        config = transformers.BertConfig(num_hidden_layers=2)
        inputs = {"input_ids": torch.randint(0, 1000, (8, 128))}
        return transformers.BertModel(config), (), inputs

The model runs once on these inputs, so that graph breaks are found. Nothing is
trained, and the model is left as it was."""

_OF_RUNS = ("inner_backend", "cached_plan", "strict")
_OF_LOOKS = ("target",)
_SAID = {
    "plan": "path of a saved plan, in place of --precision; of one for a cluster the part for --device-class",
    "passes": "also run this pass of an installed package; repeatable",
}
"""Help of options for which the command line accepts less than Python."""
_EITHER = ("fast_dropout",)
"""Switches with a third state, the default."""
_FLAGS = {"passes": "--pass"}
_METAVARS = {
    "precision": "NAME",
    "plan": "FILE",
    "device_class": "NAME",
    "root": "PATH",
    "target": "GPU",
    "passes": "NAME",
    "scaling": "WHAT",
}


def add(
    parser: argparse.ArgumentParser,
    name: str = "model",
    *,
    looks: bool = False,
    needed: bool = True,
    refused: Mapping[str, OptionError] = MappingProxyType({}),
) -> None:
    """Add the arguments.

    Args:
        parser: of a command.
        name: name of the argument for the model; "--model" makes it optional.
        looks: also adds --train, --eval and --target, for commands that only inspect a model.
        needed: whether a model is required.
        refused: errors for options that do not apply to this command. They are raised while
            arguments are parsed, and --help does not list these options.
    """
    reference = parser.add_argument_group("the model", _REFERENCE)
    extra_arguments: dict[str, Any] = {} if needed else {"nargs": "?"}
    text = "what returns (model, args) or (model, args, kwargs)"
    reference.add_argument(
        name, metavar="MODULE:CALLABLE", type=findable, help=text, **extra_arguments
    )
    parser.set_defaults(mode=None)
    if looks:
        mode = reference.add_mutually_exclusive_group()
        says = {
            "train": "call model.train() before",
            "eval": "call model.eval() before, and record no gradients",
        }
        for value, text in says.items():
            mode.add_argument(
                f"--{value}", dest="mode", action="store_const", const=value, help=text
            )
    options = parser.add_argument_group("options of the backend")
    for option, settings in _arguments(looks).items():
        if option in refused:
            settings = {
                "type": _refusing(refused[option]),
                "metavar": "",
                "help": argparse.SUPPRESS,
            }
        options.add_argument(flag(option), dest=option, **settings)


def _refusing(error: OptionError) -> Callable[[str], NoReturn]:
    def refuse(_: str) -> NoReturn:
        raise error

    return refuse


def flag(option: str) -> str:
    """Return the command-line flag of a backend option."""
    return _FLAGS.get(option, f"--{option.replace('_', '-')}")


def given(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options and the recipe that a command line sets, by name."""
    values = {name: getattr(arguments, name, None) for name in _arguments(looks=True)}
    return {name: value for name, value in values.items() if value is not None}


def _arguments(looks: bool) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {
        "recipe": {"help": literal(RECIPE_HELP), "metavar": "NAME"}
    }
    for name, text in DOCUMENTED.items():
        if name in _OF_RUNS or (name in _OF_LOOKS and not looks):
            continue
        help_text = literal(_SAID.get(name, text).removeprefix("True: "))
        metavar = {"metavar": _METAVARS.get(name, "HOW")}
        if name in _EITHER:
            result[name] = {"action": argparse.BooleanOptionalAction, "help": help_text}
        elif name in SWITCHES:
            result[name] = {"action": "store_true", "default": None, "help": help_text}
        elif name in LISTS:
            result[name] = {"action": "append", "help": help_text} | metavar
        else:
            result[name] = {"help": help_text} | metavar
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

        parameters = (
            self.model.parameters() if isinstance(self.model, torch.nn.Module) else iter(())
        )
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def on(self, device: torch.device) -> ModelArguments:
        """Return the same arguments with tensors on `device`; a module is moved in place."""
        import torch
        from torch.utils._pytree import tree_map_only

        if not isinstance(self.model, torch.nn.Module):
            return self
        self.model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (self.args, self.kwargs))
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
            do = "return a model that computes something with tensors"
            raise QSyncError("the model made no graph", where=self.reference, do=do)
        return explanation


def read(arguments: argparse.Namespace) -> ModelArguments:
    """Return the model arguments of a command line; options are checked before the model is built.

    Raises:
        QSyncError: an option or the reference is invalid.
    """
    from qsync_fx.options import Options

    options = Options.parse(given(arguments))
    return ModelArguments(arguments.model, options, arguments.mode, *load(arguments.model))
