"""CNN trained with Lightning, on unequal ranks:

    torchrun --nproc-per-node 2 examples/trainers/lightning_fit.py

The script initializes the process group, which Lightning reuses. The ranks find their plan, the
network in the LightningModule is compiled in place, and `guard` surrounds `fit`.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from digits import FORMATS, MAX_REPLANS, Network, device_class, digits, report
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import qsync_fx
from qsync_fx.distributed import Replanning, guard


class Digits(lightning.LightningModule):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main(folder: str) -> None:
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    lightning.seed_everything(0)
    network, (train, test) = Network(), digits()
    loader = DataLoader(train, batch_size=32, shuffle=True)

    plan = qsync_fx.distributed.measure_and_plan(
        network,
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        loader,
        optimizer=torch.optim.AdamW(network.parameters()),
        device_class=device_class(rank),
        precisions=FORMATS[device_class(rank)],
        repeats=3,
        max_replans=MAX_REPLANS,
        progress=False,
    )
    network.compile(backend="qsync", options={"plan": plan})
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with guard(network, check_every=20, replan=Replanning(plan)):
        trainer.fit(Digits(network), loader)
    images, labels = test.tensors
    with torch.no_grad():
        report(rank, network, network.eval()(images).argmax(1) == labels)
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", default="runs/lightning", help="folder for the files of Lightning"
    )
    main(parser.parse_args().folder)
