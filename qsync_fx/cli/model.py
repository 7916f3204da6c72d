"""What commands that take a model have in common: the arguments that name it, and the options of the backend.

Invariant: every such command takes the same ones. An option is an argument because `qsync_fx.option_texts.DOCUMENTED` has it, in its words;
those that say how a model runs are left out, for no command trains one, and the target where a command has a device by other arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from qsync_fx.cli.command import literal
from qsync_fx.cli.reference import findable
from qsync_fx.errors import OptionError
from qsync_fx.option_texts import DOCUMENTED, LISTS, SWITCHES

if TYPE_CHECKING:
    import torch

    from qsync_fx.explanation import Explanation
    from qsync_fx.options import Options

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

_OF_RUNS = ("inner", "cached_plan", "strict")
_OF_LOOKS = ("target",)
_SAID = {
    "plan": "path of a saved plan, in place of --precision; of one for a cluster the part for --device-class",
    "passes": "also run this pass of an installed package; repeatable",
}
"""What a command line can give of an option that Python can give more of."""
_EITHER = ("fast_dropout",)
"""What is on or off, and by default neither."""
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
        name: of the argument that names the model; with "--model" it may be left out.
        looks: also adds --train, --eval and --target, for commands that only look at a model.
        needed: whether there has to be a model.
        refused: errors for the options that make no sense for this command. They are raised while
            arguments are parsed, and --help does not list these options.
    """
    reference = parser.add_argument_group("the model", _REFERENCE)
    how: dict[str, Any] = {} if needed else {"nargs": "?"}
    text = "what returns (model, args) or (model, args, kwargs)"
    reference.add_argument(name, metavar="MODULE:CALLABLE", type=findable, help=text, **how)
    parser.set_defaults(mode=None)
    if looks:
        mode = reference.add_mutually_exclusive_group()
        says = {"train": "call model.train() before", "eval": "call model.eval() before, and record no gradients"}
        for value, text in says.items():
            mode.add_argument(f"--{value}", dest="mode", action="store_const", const=value, help=text)
    options = parser.add_argument_group("options of the backend")
    for option, settings in _arguments(looks).items():
        if option in refused:
            settings = {"type": _refusing(refused[option]), "metavar": "", "help": argparse.SUPPRESS}
        options.add_argument(flag(option), dest=option, **settings)


def _refusing(error: OptionError) -> Callable[[str], NoReturn]:
    def refuse(_: str) -> NoReturn:
        raise error

    return refuse


def flag(option: str) -> str:
    """Returns the argument that an option of the backend is."""
    return _FLAGS.get(option, f"--{option.replace('_', '-')}")


def given(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the options that a command line gives, by name."""
    values = {name: getattr(arguments, name, None) for name in _arguments(looks=True)}
    return {name: value for name, value in values.items() if value is not None}


def _arguments(looks: bool) -> dict[str, dict[str, Any]]:
    """Returns what argparse has to know of each option."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in DOCUMENTED.items():
        if name in _OF_RUNS or (name in _OF_LOOKS and not looks):
            continue
        help_text = literal(_SAID.get(name, text).removeprefix("True: "))
        metavar = {"metavar": _METAVARS.get(name, "HOW")}
        if name in _EITHER:
            found[name] = {"action": argparse.BooleanOptionalAction, "help": help_text}
        elif name in SWITCHES:
            found[name] = {"action": "store_true", "default": None, "help": help_text}
        elif name in LISTS:
            found[name] = {"action": "append", "help": help_text} | metavar
        else:
            found[name] = {"help": help_text} | metavar
    return found


@dataclass(frozen=True)
class Given:
    """The model that a command line names, and what it says of it."""

    reference: str
    options: Options
    mode: str | None
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        import torch

        parameters = self.model.parameters() if isinstance(self.model, torch.nn.Module) else iter(())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def on(self, device: torch.device) -> Given:
        """Returns the same with its tensors on a device; a module moves there."""
        import torch
        from torch.utils._pytree import tree_map_only

        if not isinstance(self.model, torch.nn.Module):
            return self
        self.model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (self.args, self.kwargs))
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def explain(self) -> Explanation:
        """Returns what the backend does to it; raises `QSyncError` where that is nothing."""
        import torch

        from qsync_fx.errors import QSyncError
        from qsync_fx.explanation import explain

        if self.mode is not None and isinstance(self.model, torch.nn.Module):
            self.model.train(self.mode == "train")
        with torch.set_grad_enabled(self.mode != "eval" and torch.is_grad_enabled()):
            explanation = explain(self.model, *self.args, options=self.options, **self.kwargs)
        if not explanation.graphs:
            do = "return a model that computes something with tensors"
            raise QSyncError("the model made no graph", where=self.reference, do=do)
        return explanation


def read(arguments: argparse.Namespace) -> Given:
    """Returns what a command line says of a model. Options come first: a wrong one is told before the model is made.

    Raises:
        QSyncError: an option or the reference is wrong.
    """
    from qsync_fx.cli.reference import load
    from qsync_fx.options import Options

    options = Options.parse(given(arguments))
    return Given(arguments.model, options, arguments.mode, *load(arguments.model))
