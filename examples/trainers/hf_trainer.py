"""Vision transformer trained with Hugging Face's Trainer, on unequal ranks:

    torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py

The ranks find their plan, `model.compile` compiles in place before Trainer receives the model, and
`guard` surrounds `train`.
"""

from __future__ import annotations

import argparse

import torch
from digits import FORMATS, MAX_REPLANS, device_class, digits, report
from torch import distributed
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import qsync_fx
from qsync_fx.distributed import Replanning, guard


def main(folder: str) -> None:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=12,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    assert arguments.device.type == "cpu"  # access to `device` initializes the process group
    rank = distributed.get_rank()
    set_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        id2label={index: str(index) for index in range(10)},
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = ViTForImageClassification(config)
    train, test = (
        [{"pixel_values": x[None], "labels": y} for x, y in zip(*part.tensors, strict=True)]
        for part in digits()
    )

    batch = {name: torch.stack([sample[name] for sample in train[:32]]) for name in train[0]}
    plan = qsync_fx.distributed.measure_and_plan(
        model,
        lambda model, batch: model(**batch).loss,
        [batch],
        optimizer=torch.optim.AdamW(model.parameters()),
        device_class=device_class(rank),
        precisions=FORMATS[device_class(rank)],
        repeats=3,
        max_replans=MAX_REPLANS,
        progress=False,
    )
    model.compile(backend="qsync", options={"plan": plan})
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test)
    with guard(model, check_every=20, replan=Replanning(plan)):
        trainer.train()
    with torch.no_grad():
        model.train(False)
        logits = model(torch.stack([sample["pixel_values"] for sample in test])).logits
    report(rank, model, logits.argmax(1) == torch.stack([sample["labels"] for sample in test]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", default="runs/hf_trainer", help="folder for the files of Trainer"
    )
    main(parser.parse_args().folder)
