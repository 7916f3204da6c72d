"""What commands that train share: which formats, which module, and what it takes for a loss."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from qsync_fx.cli import model_args
from qsync_fx.cli.output import to_write
from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from qsync_fx.cli.model_args import ModelArguments

LOSS = "the loss is what the model returns as such, else the mean square of what it returns"


@dataclass(frozen=True)
class Trained:
    """A model that a command line names, as `measure` and `sensitivity` take one.

    Attributes:
        given: what the command line says of it.
        module: in training mode.
        step: from the module and a batch to the loss.
        batches: the one that the model comes with.
        precisions: names of formats; None for those that the device has units for.
    """

    given: ModelArguments
    module: Any
    step: Callable[[Any, Any], Tensor]
    batches: list[Any]
    precisions: list[str] | None


def add(
    parser: argparse.ArgumentParser,
    title: str,
    precisions: str,
    noun: str,
    *,
    needed: bool = True,
    refused: Mapping[str, OptionError] = MappingProxyType({}),
) -> argparse._ArgumentGroup:
    """Add the model's arguments and a group with --precisions.

    Args:
        parser: of the command.
        title: of the group.
        precisions: the help of --precisions.
        noun: the result of the command, such as "a profile", for the error about --precision.
        needed: whether there has to be a model.
        refused: errors for further options that the command refuses.

    Returns:
        The group.
    """
    one_precision = OptionError(
        f"{noun} is of several precisions", where="--precision", do="name them with --precisions"
    )
    model_args.add(parser, needed=needed, refused={"precision": one_precision, **refused})
    group = parser.add_argument_group(title)
    group.add_argument("--precisions", metavar="NAMES", help=precisions)
    return group


def add_output(parser: argparse.ArgumentParser, output: str, json: str) -> None:
    """Adds --output and --json, whose help is given."""
    saved = parser.add_argument_group("what to write")
    saved.add_argument("--output", metavar="FILE", type=to_write, help=output)
    saved.add_argument("--json", action="store_true", help=json)


def read(arguments: argparse.Namespace) -> Trained:
    """Return the model that a command line names, with its step and its batch.

    Raises:
        OptionError: an option is wrong, or the model has no parameters.
    """
    import torch

    # What was interrupted finds the same weights when it goes on.
    torch.manual_seed(0)
    value = model_args.read(arguments)
    if not hasattr(value.model, "parameters"):
        raise OptionError(
            "a function has nothing to train", where=value.reference, do="return a module"
        )
    module: Any = value.model
    return Trained(
        value,
        module.train(),
        lambda trained, inputs: loss_of(trained(*inputs[0], **inputs[1]), value.reference),
        [(value.args, value.kwargs)],
        None if arguments.precisions is None else arguments.precisions.split(","),
    )


def loss_of(result: Any, reference: str) -> Tensor:
    """Returns the loss in what a model returned: the tensor without dimensions, or `.loss`, or the mean square of all that needs gradients.

    Raises:
        OptionError: nothing of it needs one.
    """
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(loss := getattr(result, "loss", None), torch.Tensor):
        return loss
    matches = [
        t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not matches:
        raise OptionError(
            "the model returns nothing that can be trained",
            where=reference,
            do="return a model whose outputs need gradients",
        )
    if len(matches) == 1 and not matches[0].dim():
        return matches[0]
    return torch.stack([t.float().square().mean() for t in matches]).sum()


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    """Adds --optimizer."""
    text = "a class of torch.optim, or none; adamw by default"
    group.add_argument("--optimizer", metavar="NAME", default="adamw", help=text)


def optimizer(name: str, module: Any) -> Optimizer | None:
    """Returns the optimizer that --optimizer names; raises `OptionError` where torch has none of this name."""
    import torch

    from qsync_fx.errors import nearest

    classes: dict[str, Any] = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    if name == "none":
        return None
    if name not in classes:
        raise OptionError(
            f"torch.optim has no {name!r}",
            where="--optimizer",
            do=nearest(name, ["none", *classes]),
        )
    made: Optimizer = classes[name](module.parameters(), lr=1e-3)
    return made
