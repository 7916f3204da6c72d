"""Small models of many architectures, from configurations and seeds.

Invariants: two builds of a case return equal weights and inputs, a forward pass draws no random
numbers (dropout is off), and the loss is a scalar. Sizes are the smallest that use every operator
of the architecture: several heads, tokens and experts, and odd images if strides allow them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models.zoo_torch import (
    VOCABULARY,
    Inputs,
    perceptron,
    recurrent,
    resnet,
    signals,
    tokens,
    transformer,
    unet,
    vgg,
)


@dataclass(frozen=True)
class Case:
    """Architecture with inputs.

    Attributes:
        name: name in test ids.
        build: returns the model and the keyword arguments of its forward.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]


def make(case: Case) -> tuple[nn.Module, Inputs]:
    """Build a case in training mode from a fixed seed."""
    torch.manual_seed(0)
    model, inputs = case.build()
    return model.train(), inputs


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output, or its mean squared error to distinct values."""
    if isinstance(output, Tensor):
        if output.dim() == 0:
            return output
        return F.mse_loss(output.float(), torch.linspace(-1, 1, output.numel()).view(output.shape))
    loss: Tensor = output.loss
    return loss


# Language models.

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
    # Attention weights that are not uniform, so that errors change the loss.
    "initializer_range": 0.1,
}


def language(
    name: str, padded: bool = False, **changes: Any
) -> Callable[[], tuple[nn.Module, Inputs]]:
    """Return a builder of the language model `hf.<name>` with `_SMALL` and `changes`."""

    def build() -> tuple[nn.Module, Inputs]:
        model_class = getattr(hf, name)
        config = model_class.config_class(**{**_SMALL, **changes})
        inputs = {"input_ids": tokens(), "labels": tokens()}
        if padded:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["attention_mask"][0, -3:] = 0
        return model_class(config), inputs

    return build


def speaking_both_ways(name: str, **changes: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    """Return a builder of the encoder-decoder model `hf.<name>`."""
    small = {
        **_SMALL,
        "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
        "encoder_layers": 1,
        "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "decoder_start_token_id": 1,
    }  # fmt: skip

    def build() -> tuple[nn.Module, Inputs]:
        model_class = getattr(hf, name)
        model = model_class(model_class.config_class(**{**small, **changes}))
        return model, {"input_ids": tokens(length=7), "labels": tokens()}

    return build


def whisper() -> tuple[nn.Module, Inputs]:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=11,
        max_target_positions=16, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 22),
        "labels": tokens(2),
    }


# Vision models.


def vision(name: str, size: int = 32, **config: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        model_class = getattr(hf, name)
        model = model_class(model_class.config_class(num_labels=5, **config))
        return model, {
            "pixel_values": torch.randn(4, 3, size, size),
            "labels": torch.randint(5, (4,)),
        }

    return build


def clip() -> tuple[nn.Module, Inputs]:
    half = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = hf.CLIPConfig(
        text_config={
            **half,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        vision_config={**half, "image_size": 20, "patch_size": 10},
        projection_dim=24,
    )
    model = hf.CLIPModel(config)

    class Contrasting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = model

        def forward(self, **inputs: Tensor) -> Any:
            return self.clip(**inputs, return_loss=True)

    return Contrasting(), {"input_ids": tokens(4), "pixel_values": torch.randn(4, 3, 20, 20)}


def recomputing(name: str) -> Callable[[], tuple[nn.Module, Inputs]]:
    """Return a builder of a two-layer language model with activation checkpointing."""

    def build() -> tuple[nn.Module, Inputs]:
        model, inputs = language(name, num_hidden_layers=2)()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model, inputs

    return build


_FEW_HEADS = {"num_key_value_heads": 2, "head_dim": 8}

CASES = (
    Case("bert", language("BertForMaskedLM", padded=True)),
    Case("roberta", language("RobertaForMaskedLM", padded=True)),
    Case("deberta",
    language("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"],
    position_buckets=4)),
    Case("electra", language("ElectraForMaskedLM", embedding_size=16)),
    Case("distilbert",
    language("DistilBertForMaskedLM", dim=32, n_layers=1, n_heads=4, hidden_dim=48)),
    Case("albert", language("AlbertForMaskedLM", embedding_size=16)),
    Case("gpt2", language("GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=4, n_positions=32)),
    Case("llama", language("LlamaForCausalLM", padded=True, **_FEW_HEADS)),
    Case("opt", language("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32)),
    Case("gpt_neox", language("GPTNeoXForCausalLM")),
    Case("bloom", language("BloomForCausalLM", n_head=4, n_layer=1)),
    Case("falcon", language("FalconForCausalLM")),
    Case("qwen2", language("Qwen2ForCausalLM", num_key_value_heads=2)),
    Case("mistral", language("MistralForCausalLM", sliding_window=4, **_FEW_HEADS)),
    Case("gemma", language("GemmaForCausalLM", **_FEW_HEADS)),
    Case("phi", language("PhiForCausalLM")),
    Case("mixtral",
    language("MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2, **_FEW_HEADS)),
    Case("qwen2_moe",
    language("Qwen2MoeForCausalLM", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24,
                               shared_expert_intermediate_size=40, num_key_value_heads=2)),
    Case("mamba", language("MambaForCausalLM", state_size=4)),
    Case("mamba2",
    language("Mamba2ForCausalLM", num_heads=4, head_dim=16, state_size=4, n_groups=2,
    chunk_size=4)),
    Case("t5", speaking_both_ways("T5ForConditionalGeneration")),
    Case("bart", speaking_both_ways("BartForConditionalGeneration")),
    Case("whisper", whisper),
    Case("vit",
    vision("ViTForImageClassification", 24, image_size=24, patch_size=8, **{k: _SMALL[k] for k in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)),
    Case("swin",
    vision("SwinForImageClassification", 16, image_size=16, patch_size=2, embed_dim=16,
    depths=[2, 1],
                        num_heads=[2, 4], window_size=4, drop_path_rate=0.0)),
    Case("convnext",
    vision("ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
                            drop_path_rate=0.0, layer_scale_init_value=0.5)),
    Case("resnet_hf",
    vision("ResNetForImageClassification", embedding_size=8, hidden_sizes=[16, 24], depths=[1, 1])),
    Case("clip", clip),
    Case("resnet", resnet),
    Case("vgg", vgg),
    Case("unet", unet),
    Case("signals", signals),
    Case("transformer", transformer),
    Case("recurrent", recurrent),
    Case("perceptron", perceptron),
    Case("bert_recomputing", recomputing("BertForMaskedLM")),
    Case("llama_recomputing", recomputing("LlamaForCausalLM")),
    Case("transformer_recomputing", lambda: transformer(checkpointed=True)),
)  # fmt: skip
