"""A Llama-like stack on long rows: RMSNorm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.workloads.base import TrainableModel, Workload
from offload.workloads.corpus import next_token_batches

__all__ = ["Llama", "LlamaConfig", "llama_workload"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the stack and of its batches.

    Args:
        layers: number of blocks.
        width: size of the residual stream; a multiple of ``heads``.
        heads: query heads; a multiple of ``kv_heads``.
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads.
        hidden: inner size of the SwiGLU MLP.
        length: tokens in a row.
        rows: rows in a batch.
        vocabulary: token ids; 256 trains on characters.
        rope_base: base of the rotary frequencies.
    """

    layers: int = 4
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 1408
    length: int = 4096
    rows: int = 1
    vocabulary: int = 4096
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} gives {self.heads} heads no even size")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv heads equally")


class LlamaBlock(nn.Module):
    """Attention and MLP, each added to the stream after an RMSNorm; (B, T, D) to (B, T, D)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.width
        self.head_size = width // config.heads
        kv_width = config.kv_heads * self.head_size
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, config.hidden, bias=False)
        self.up = nn.Linear(width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream after this block; ``cos`` and ``sin`` have shape ``(T, D / heads)``."""
        h = self.attention_norm(x)
        q = _rotate(self._heads(self.q(h)), cos, sin)
        k = _rotate(self._heads(self.k(h)), cos, sin)
        v = self._heads(self.v(h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_size).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(TrainableModel):
    """Embedding, blocks and a linear head; returns the mean cross-entropy of the next token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        head_size = config.width // config.heads
        frequencies = config.rope_base ** (-torch.arange(0, head_size, 2) / head_size)
        angles = torch.outer(torch.arange(config.length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            inputs: token ids, int64 of shape ``(B, T)``.
            targets: the ids that follow, same shape.
        """
        length = inputs.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.tokens(inputs)
        for block in self.blocks:
            x = self.run_block(block, x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama_workload(name: str, config: LlamaConfig) -> Workload:
    """Next-token training of the stack on the standard library's sources."""
    c = config
    summary = (
        f"Llama-like, {c.layers} layers, d {c.width}, {c.heads}/{c.kv_heads} heads, "
        f"T {c.length}, B {c.rows}, vocabulary {c.vocabulary}"
    )
    make_batch = next_token_batches(c.vocabulary, c.rows, c.length)
    return Workload(name, summary, partial(Llama, c), make_batch)
