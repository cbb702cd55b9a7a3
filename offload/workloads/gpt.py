"""A GPT: pre-norm transformer with learned positions, trained to predict the next token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.workloads.base import TrainableModel, Workload
from offload.workloads.corpus import next_token_batches

__all__ = ["GPT", "GPTConfig", "gpt_workload"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT and of its batches.

    Args:
        layers: number of blocks.
        width: size of the residual stream; a multiple of ``heads``.
        heads: attention heads.
        length: tokens in a row.
        rows: rows in a batch.
        vocabulary: token ids; 256 trains on characters.
        dropout: probability, after attention and MLP and inside attention.
    """

    layers: int = 12
    width: int = 512
    heads: int = 8
    length: int = 512
    rows: int = 4
    vocabulary: int = 8192
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")


class GPTBlock(nn.Module):
    """Attention and MLP, each added to the stream after a LayerNorm; (B, T, D) to (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        x = x + F.dropout(self._attend(self.attention_norm(x)), self.dropout, self.training)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + F.dropout(self.mlp_out(hidden), self.dropout, self.training)

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        # One storage holds q, k and v; attention saves three strided views of it.
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class GPT(TrainableModel):
    """Embeddings, blocks and a linear head; returns the mean cross-entropy of the next token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(partial(_initialise, residual_std=0.02 / (2 * config.layers) ** 0.5))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            inputs: token ids, int64 of shape ``(B, T)``.
            targets: the ids that follow, same shape.
        """
        x = self.tokens(inputs) + self.positions(
            torch.arange(inputs.shape[1], device=inputs.device)
        )
        for block in self.blocks:
            x = self.run_block(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module, residual_std: float) -> None:
    # GPT-2's scheme: layers that write into the stream start smaller, by its depth.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, GPTBlock):
        nn.init.normal_(module.attention_out.weight, std=residual_std)
        nn.init.normal_(module.mlp_out.weight, std=residual_std)


def gpt_workload(name: str, config: GPTConfig) -> Workload:
    """Next-token training of a GPT on the standard library's sources."""
    c = config
    summary = (
        f"GPT, {c.layers} layers, d {c.width}, T {c.length}, B {c.rows}, vocabulary {c.vocabulary}"
    )
    make_batch = next_token_batches(c.vocabulary, c.rows, c.length)
    return Workload(name, summary, partial(GPT, c), make_batch)
