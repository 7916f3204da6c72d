"""Number of casts and quantizations in a training step of ten models.
They are counted in the lowered graphs. "casts" counts nodes that only change the dtype of a
floating-point tensor, and "quantizes" counts `qsync::quantize`; each is a pass over memory unless
it is fused. "*_before" are the counts of an earlier commit: of the file given by --before, else of
the file given by --json. Create the file of --before by running this script with PYTHONPATH set to
its checkout. The models have their published depths and small widths; the script measures no times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, fx, nn

import qsync_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, show, write_json

Model = tuple[nn.Module, dict[str, Tensor]]

# A graph that falls back to eager has no nodes to count.
os.environ.setdefault("QSYNC_VERIFY", "raise")

WORDS = 97
HEADS: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4}
TEXT: dict[str, Any] = {
    **HEADS,
    "vocab_size": WORDS,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "use_cache": False,
}
IMAGES = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(2 * 8).reshape(2, 8) + 3
    return {"input_ids": ids, "labels": ids}


def resnet(depths: tuple[int, ...], kind: str) -> Model:
    # The same blocks have shortcut convolutions as in the full model.
    widths = {"basic": [8, 16, 24, 32], "bottleneck": [32, 64, 96, 128]}[kind]
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=list(depths), layer_type=kind, num_labels=2
    )
    return hf.ResNetForImageClassification(config), IMAGES


class Vgg16(nn.Module):
    """VGG-16 with batch norm (Simonyan and Zisserman, configuration D), an eighth as wide."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (8, 8, 0, 16, 16, 0, 32, 32, 32, 0, 64, 64, 64, 0, 64, 64, 64, 0):
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 2)
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(pixel_values), labels)


def convnext() -> Model:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[3, 3, 9, 3], num_labels=2)
    return hf.ConvNextForImageClassification(config), IMAGES


def bert() -> Model:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, num_hidden_layers=12)), tokens()


def gpt2() -> Model:
    config = hf.GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_layer=12,
        n_head=4,
        n_positions=32,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config), tokens()


def llama() -> Model:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**TEXT, num_hidden_layers=16, num_key_value_heads=2)
    ), tokens()


def t5() -> Model:
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=6,
        num_heads=4,
        decoder_start_token_id=1,
        use_cache=False,
    )
    return hf.T5ForConditionalGeneration(config), tokens()


def vit() -> Model:
    sizes: dict[str, Any] = {
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 2,
    }
    config = hf.ViTConfig(**HEADS, **sizes, num_hidden_layers=12)
    return hf.ViTForImageClassification(config), IMAGES


def whisper() -> Model:
    sizes: dict[str, Any] = {
        f"{part}_{component}": count
        for part in ("encoder", "decoder")
        for component, count in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 64))
    }
    positions: dict[str, Any] = {
        "max_source_positions": 11,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
    }
    config = hf.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        use_cache=False,
        pad_token_id=0,
        **sizes,
        **positions,
    )
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.zeros(2, 8, 22),
        "labels": tokens()["labels"],
    }


MODELS: dict[str, Callable[[], Model]] = {
    "ResNet-18": lambda: resnet((2, 2, 2, 2), "basic"),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), "bottleneck"),
    "VGG-16": lambda: (Vgg16(), IMAGES),
    "ConvNeXt-T": convnext,
    "ViT-B": vit,
    "BERT-base": bert,
    "GPT-2": gpt2,
    "Llama": llama,
    "T5-small": t5,
    "Whisper-tiny": whisper,
}


def count(build: Callable[[], Model], precision: str) -> dict[str, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = build()
    explanation = qsync_fx.explain(model.train(), **inputs, options={"precision": precision})
    graphs = [explanation.graph_module("lower", index) for index in range(len(explanation.graphs))]
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    quantizes = sum(node.target is torch.ops.qsync.quantize.default for node in nodes)
    return {"casts": sum(map(converts, nodes)), "quantizes": quantizes}


def converts(node: fx.Node) -> bool:
    """Return whether a node only changes the dtype of a floating-point tensor."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name != "aten::to":
        return False
    source = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return bool(before is not after and before.is_floating_point and after.is_floating_point)


def earlier(options: Any) -> dict[str, Any]:
    """Return the counts of --before, else the earlier counts in the file of --json."""
    if options.before:
        previous = json.loads(options.before.read_text())
        rows = [
            {**row, "casts_before": row["casts"], "quantizes_before": row["quantizes"]}
            for row in previous["rows"]
        ]
        return {"commit": previous["commit"], "rows": rows}
    if options.json and options.json.exists():
        previous = json.loads(options.json.read_text())
        return {"commit": previous.get("before"), "rows": previous["rows"]}
    return {"commit": None, "rows": []}


def commit() -> str:
    folder = Path(qsync_fx.__file__).resolve().parent
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def main() -> None:
    options = arguments(
        __doc__, before={"type": Path, "metavar": "PATH", "help": "counts of an earlier commit"}
    )
    before = earlier(options)
    rows_before = {(row["case"], row["precision"]): row for row in before["rows"]}
    rows: list[Row] = []
    for name in by_size(options.quick, list(MODELS)[:1], MODELS):
        for precision in ("bf16", "int8"):
            print(f"{name}: {precision}", flush=True)
            unchanged = {
                key: value
                for key, value in rows_before.get((name, precision), {}).items()
                if key.endswith("_before")
            }
            rows.append(
                {
                    "case": name,
                    "precision": precision,
                    **count(MODELS[name], precision),
                    **unchanged,
                }
            )
    show(rows)
    if options.json:
        write_json(options.json, rows, options.quick, commit=commit(), before=before["commit"])
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
