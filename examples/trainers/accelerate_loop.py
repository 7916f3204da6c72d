"""CNN trained in a loop with Hugging Face Accelerate, on unequal ranks:

    torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py

The ranks find their plan, `model.compile` compiles in place before `prepare` wraps the model, and
`guard` surrounds the loop.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import FORMATS, MAX_REPLANS, Network, device_class, digits, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import qsync_fx
from qsync_fx.distributed import Replanning, guard


def main() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    set_seed(0)
    model, (train, test) = Network(), digits()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(train, batch_size=32, shuffle=True)

    plan = qsync_fx.distributed.measure_and_plan(
        model,
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        loader,
        optimizer=optimizer,
        device_class=device_class(rank),
        precisions=FORMATS[device_class(rank)],
        repeats=3,
        max_replans=MAX_REPLANS,
        progress=False,
    )
    model.compile(backend="qsync", options={"plan": plan})
    parallel, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with guard(parallel, check_every=20, replan=Replanning(plan)):
        for _ in range(4):
            for images, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(cross_entropy(parallel(images), labels))
                optimizer.step()
    images, labels = test.tensors
    with torch.no_grad():
        report(rank, model, model.eval()(images).argmax(1) == labels)
    accelerator.end_training()


if __name__ == "__main__":
    main()
