"""Small models of transformers, made from a configuration, and what else these tests share."""

import importlib
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import rand

os.environ["HF_HUB_OFFLINE"] = "1"


def library(name: str) -> Any:
    """Skips where it is not installed; what it imports from others, and how, is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


transformers, peft = library("transformers"), library("peft")
accelerate, lightning = library("accelerate"), library("lightning.pytorch")

LAYERS = 3
TOKENS, WIDTH = 8, 32
BOUNDARY_BYTES = 2 * TOKENS * WIDTH * 4


def llama(layers: int = LAYERS, use_cache: bool = False) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, vocab_size=64,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            use_cache=use_cache,
        )
    )  # fmt: skip


def gpt2(layers: int = LAYERS, use_cache: bool = False) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=WIDTH, n_layer=layers, n_head=2, vocab_size=64, n_positions=32,
            use_cache=use_cache,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def vit(layers: int = LAYERS) -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, image_size=16,
            num_attention_heads=2, patch_size=8, num_labels=3, hidden_dropout_prob=0.1,
        )
    )  # fmt: skip


def tokens(seed: int = 0, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(64, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def images(seed: int = 0) -> dict[str, Tensor]:
    return {"pixel_values": rand(2, 3, 16, 16, seed=seed), "labels": torch.tensor([0, 2])}


MODELS = {"llama": (llama, tokens), "gpt2": (gpt2, tokens), "vit": (vit, images)}


def make(build: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(*args).train()


def checkpointed(model: nn.Module, use_reentrant: bool) -> nn.Module:
    """With transformers' own activation checkpointing, under the name that it has."""
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


def trained(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def forward_backward(model: nn.Module, batch: dict[str, Tensor], context: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with context:
        loss = model(**batch).loss
        loss.backward()
    return [loss.detach(), *trained(model)]
