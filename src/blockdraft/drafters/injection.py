"""Attention over injected context: keys and values come from the target's features and from the block, by the same matrices."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from blockdraft.engine.attention import Mask, attend


class KeyValues(Protocol):
    """Where a layer's new keys and values go and what it attends over: a KVCache in decoding, a concatenation in training."""

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


class Attention(nn.Module):
    """Qwen3 attention whose context keys and values come from the target's features."""

    def __init__(self, c: Qwen3Config):
        super().__init__()
        size: int = c.head_dim
        heads, kv_heads, bias = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads, c.attention_bias
        self.head_dim, self.scale = size, size**-0.5
        self.q_proj = nn.Linear(c.hidden_size, heads * size, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=c.rms_norm_eps)

    def heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_dim)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, kv heads, tokens, head size]`` of features or block rows: the same matrices serve both."""
        keys = rotate(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), *rope)
        return keys, self.heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: KeyValues, layer: int, mask: Mask) -> Tensor:
        query = rotate(self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2), *rope)
        keys, values = kv.update(*self.keys_values(x, rope), layer)
        return self.o_proj(attend(query, keys, values, mask, self.scale).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in halves (NeoX layout) of ``[rows, heads, tokens, head size]``."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def visible_rule(causal: bool, window: int | None) -> Callable[..., Tensor]:
    """Which key position a slot sees, on absolute positions (z-lab/dflash 0.1.0, ``_attention_mask``)."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) if causal else torch.ones_like(key <= query)
        if window is not None:
            seen = seen & (query - key < window)
            if not causal:
                seen = seen & (key - query < window)
        return seen

    return rule
