"""Command-line arguments for training: formats, module, loss and optimizer."""

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

LOSS = """\
The loss is the .loss of the model's output, or the output itself if it is one
scalar; otherwise it is the sum of the mean squares of all outputs."""


@dataclass(frozen=True)
class Trained:
    """Model that a command line names, in the form that `measure` and `sensitivity` accept.

    Attributes:
        given: model arguments.
        module: in training mode.
        step: computes the loss from the module and a batch.
        batches: the single batch that the model's function returns.
        precisions: names of formats; None for formats with a native unit on the device.
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
    required: bool = True,
    refused: Mapping[str, OptionError] = MappingProxyType({}),
) -> argparse._ArgumentGroup:
    """Add the model's arguments and a group with --precisions.

    Args:
        parser: of the command.
        title: of the group.
        precisions: help text of --precisions.
        noun: result of the command, such as "a profile", for the error about --precision.
        required: whether a model is required.
        refused: errors for further options that the command refuses.

    Returns:
        The group.
    """
    one_precision = OptionError(
        f"{noun} covers several precisions", where="--precision", do="use --precisions instead"
    )
    model_args.add(parser, required=required, refused={"precision": one_precision, **refused})
    group = parser.add_argument_group(title)
    group.add_argument("--precisions", metavar="NAMES", help=precisions)
    return group


def add_output(parser: argparse.ArgumentParser, output: str, json: str) -> None:
    """Add --output and --json with these help texts."""
    saved = parser.add_argument_group("output")
    saved.add_argument("--output", metavar="FILE", type=to_write, help=output)
    saved.add_argument("--json", action="store_true", help=json)


def read(arguments: argparse.Namespace) -> Trained:
    """Return the model that a command line names, with its step and its batch.

    Raises:
        OptionError: an option is invalid, or the model has no parameters.
    """
    import torch

    # A resumed measurement needs the same weights.
    torch.manual_seed(0)
    value = model_args.read(arguments)
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
        None if arguments.precisions is None else arguments.precisions.split(","),
    )


def loss_of(result: Any, reference: str) -> Tensor:
    """Return the loss: `.loss`, or a single scalar output, or the sum of mean squares.

    The sum is over all output tensors that require gradients.

    Raises:
        OptionError: no output requires gradients.
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
            "no output of the model requires gradients",
            where=reference,
            do="return a model whose outputs require gradients",
        )
    if len(matches) == 1 and not matches[0].dim():
        return matches[0]
    return torch.stack([t.float().square().mean() for t in matches]).sum()


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    text = "class of torch.optim in lower case, or none; adamw by default"
    group.add_argument("--optimizer", metavar="NAME", default="adamw", help=text)


def optimizer(name: str, module: Any) -> Optimizer | None:
    """Return the optimizer that --optimizer names; raise `OptionError` if torch has none."""
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
            f"torch.optim has no optimizer {name!r}",
            where="--optimizer",
            do=nearest(name, ["none", *classes]),
        )
    made: Optimizer = classes[name](module.parameters(), lr=1e-3)
    return made
