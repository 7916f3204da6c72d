"""What commands that train take for a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsync_fx.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = "the loss is what the model returns as such, else the mean square of what it returns"


def loss_of(result: Any, reference: str) -> Tensor:
    """Returns the loss in what a model returned: the tensor without dimensions, or `.loss`, or the mean square of all that needs gradients.

    Raises:
        OptionError: nothing of it needs one.
    """
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(loss := getattr(result, "loss", None), torch.Tensor):
        return loss
    found = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not found:
        raise OptionError(
            "the model returns nothing that can be trained",
            where=reference,
            do="return a model whose outputs need gradients",
        )
    if len(found) == 1 and not found[0].dim():
        return found[0]
    return torch.stack([t.float().square().mean() for t in found]).sum()
