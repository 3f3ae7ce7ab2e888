"""A transformer block as Llama 3 has it: what a layer's speed is worth in a real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from fp8.testing.perf.scenarios import Block

#: The base of Llama 3's rotary angles (arXiv:2407.21783, section 3.2).
_THETA = 500_000.0


class LlamaBlock(nn.Module):
    """Pre-norm attention with grouped keys and values, then SwiGLU: (batch, sequence, width)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, widths: Block) -> None:
        super().__init__()
        self._heads, self._groups = widths.heads, widths.groups
        head = widths.width // widths.heads
        shared = head * widths.groups
        self.attention_norm = nn.RMSNorm(widths.width)
        self.wq = nn.Linear(widths.width, widths.width, bias=False)
        self.wk = nn.Linear(widths.width, shared, bias=False)
        self.wv = nn.Linear(widths.width, shared, bias=False)
        self.wo = nn.Linear(widths.width, widths.width, bias=False)
        self.mlp_norm = nn.RMSNorm(widths.width)
        self.gate = nn.Linear(widths.width, widths.hidden, bias=False)
        self.up = nn.Linear(widths.width, widths.hidden, bias=False)
        self.down = nn.Linear(widths.hidden, widths.width, bias=False)
        angles = _angles(widths.sequence, head)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, sequence, width)."""
        h = self.attention_norm(x)
        q = self._rotated(self._split(self.wq(h), self._heads))
        k = self._rotated(self._split(self.wk(h), self._groups))
        v = self._split(self.wv(h), self._groups)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(batch, sequence, heads·head) to (batch, heads, sequence, head)."""
        split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return split

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1)


def _angles(sequence: int, head: int) -> Tensor:
    """(sequence, head / 2): position times the frequency of each pair of features."""
    frequencies = torch.pow(_THETA, -torch.arange(0, head, 2) / head)
    return torch.outer(torch.arange(sequence), frequencies)
