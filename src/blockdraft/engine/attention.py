"""Attention over a KVCache: one function and one mask that transformers' models of every family call.

transformers lets a model's attention and mask building be replaced by name. The mask rules of a family (causal, sliding,
chunked) arrive as index functions; here they are evaluated on the true *positions* of queries and keys, so that the same
rules hold for ragged rows and for draft trees, where a slot in the buffer is not a position.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.kernels import attend_rows, library
from blockdraft.engine.memory import placed

NAME = "blockdraft"
FEW = 96  # queries of a row that our own kernel attends for; a prompt's pass is SDPA's


@dataclass(frozen=True)
class BlockedMask:
    """Who sees whom where queries come in blocks that see a common context and nobody else's block.

    Attributes:
        context: additive ``[rows, 1, blocks * slots, context]``.
        own: additive ``[rows, 1, blocks, slots, own keys]``, inside each block.
    """

    context: Tensor
    own: Tensor


Mask = Tensor | BlockMask | BlockedMask | None
_cache: ContextVar[KVCache] = ContextVar("blockdraft_cache")


@contextmanager
def attending_over(kv: KVCache, config: PreTrainedConfig) -> Iterator[None]:
    """Let a model attend over ``kv``; outside, its own attention implementation is in force again."""
    own = config._attn_implementation
    config._attn_implementation = NAME
    token = _cache.set(kv)
    try:
        yield
    finally:
        _cache.reset(token)
        config._attn_implementation = own


def visibility(span: Span, rule: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Which key each new token sees: bool ``[rows, 1, count, end]``.

    Args:
        span: the forward pass.
        rule: ``(batch, head, query position, key position) -> bool``, broadcasting.
        device: of the result.
    """
    rows, count = span.positions.shape
    starts = placed(span.starts, device)[:, None]
    slots = torch.arange(span.end, device=device).expand(rows, -1)
    new = slots - starts  # index among the new tokens; negative: committed
    index = new.clamp(0, count - 1)
    key_positions = torch.where(new < 0, slots, span.positions.gather(1, index))
    batch = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.long, device=device)
    seen = rule(batch, head, span.positions[:, None, :, None], key_positions[:, None, None, :])
    seen = seen & (new < count)[:, None, None, :]
    if span.visible is not None:
        among_new = span.visible.gather(2, index[:, None, :].expand(-1, count, -1))
        seen = seen & ((new < 0)[:, None, None, :] | among_new[:, None])
    return seen.expand(rows, 1, count, span.end)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The plain rule, for ``visibility``."""
    return key <= query


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    **kwargs: object,
) -> Tensor | None:
    cache = _cache.get()
    span = cache.span
    assert span is not None
    cache.causal_only &= mask_function is causal_mask_function
    if span.mask is not None:
        return span.mask
    if mask_function is causal_mask_function and span.count == 1 and span.visible is None:
        if span.lone and len(span.starts) == 1 and (cache.device.type != "cpu" or library() is None):
            return None
        return placed(span.starts, cache.device, torch.int32) + 1
    return additive(visibility(span, mask_function, cache.device), cache.dtype)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention without repeating keys: the queries of a group become further rows of its key/value head.

    Args:
        query: ``[rows, heads, count, head size]``, any float dtype.
        keys, values: ``[rows, kv heads, length, head size]``; their dtype is the one computed in.
        mask: additive ``[rows or 1, 1, count, length]``; int32 ``[rows]``: of how many keys each row's one query sees; a
            BlockMask (FlexAttention; no soft cap, no sinks); a BlockedMask (neither); or None.
        scale: of the scores.
        softcap: ``s * tanh(scores / s)`` before the mask (Gemma 2).
        sinks: ``[heads]`` logits of a key that holds nothing (gpt-oss).

    Returns:
        ``[rows, count, heads, head size]`` in the query's dtype.
    """
    if isinstance(mask, BlockedMask):
        assert softcap is None and sinks is None
        return _attend_blocked(query.to(keys.dtype), keys, values, mask, scale).to(query.dtype)
    if isinstance(mask, BlockMask):
        assert softcap is None and sinks is None
        flex = _compiled_flex() if query.is_cuda else cast(Callable[..., Tensor], flex_attention)
        same = query.to(keys.dtype)
        out = flex(same, keys, values, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1])
        return out.transpose(1, 2).to(query.dtype)
    rows, heads, count, size = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    if mask is not None and mask.dim() == 1:
        if softcap is None and sinks is None and not torch.is_grad_enabled():
            ragged = attend_rows(query.reshape(rows, kv_heads, -1, size).to(keys.dtype), keys, values, mask, scale)
            if ragged is not None:
                return ragged.view(rows, heads, 1, size).transpose(1, 2).to(query.dtype)
        seen = torch.arange(length, device=keys.device) < mask[:, None]
        mask = additive(seen[:, None, None], keys.dtype)
    group = heads // kv_heads
    plain = softcap is None and sinks is None and query.device.type == "cpu"
    if mask is not None and count <= FEW and plain and not torch.is_grad_enabled():  # the kernel has no gradients
        lengths = torch.full((rows,), length, dtype=torch.int32)
        found = attend_rows(query.reshape(rows, kv_heads, group * count, size).to(keys.dtype), keys, values, lengths, scale, mask)
        if found is not None:
            return found.view(rows, heads, count, size).transpose(1, 2).to(query.dtype)
    folded = query.reshape(rows, kv_heads, group * count, size).to(keys.dtype)
    if mask is not None and group > 1:
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(mask.shape[0], 1, group * count, length)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = (folded @ keys.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, count, -1)
            scores = torch.cat([scores, sink.reshape(rows, kv_heads, group * count, 1)], dim=-1)
        out = torch.softmax(scores.float(), dim=-1).to(values.dtype)[..., :length] @ values
    return out.view(rows, heads, count, -1).transpose(1, 2).to(query.dtype)


def _attend_blocked(query: Tensor, keys: Tensor, values: Tensor, mask: BlockedMask, scale: float) -> Tensor:
    """The context's scores as one product, each block's own ones as small products, one softmax over both.

    A dense mask would let every block meet the keys of all blocks: half of the work, thrown away.
    """
    rows, heads, count, size = query.shape
    kv_heads, context = keys.shape[1], mask.context.shape[-1]
    group, (blocks, slots, owned) = heads // kv_heads, mask.own.shape[2:]
    query = query.reshape(rows, kv_heads, group * count, size) * scale
    inner = query.view(rows, kv_heads, group, blocks, slots, size)
    own_keys, own_values = (x[:, :, None, context:].unflatten(3, (blocks, owned)) for x in (keys, values))
    of_context = (query @ keys[:, :, :context].transpose(2, 3)).view(rows, kv_heads, group, count, context) + mask.context[
        :, :, None
    ]
    of_own = (inner @ own_keys.transpose(4, 5) + mask.own[:, :, None]).view(rows, kv_heads, group, count, owned)
    shares = torch.cat([of_context, of_own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    out = shares[..., :context].reshape(rows, kv_heads, group * count, context) @ values[:, :, :context]
    own = shares[..., context:].view(rows, kv_heads, group, blocks, slots, owned) @ own_values
    out = out.view(rows, heads, count, size) + own.view(rows, heads, count, size)
    return out.transpose(1, 2)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention as one kernel; uncompiled it would write out all scores. Dynamic: one compilation for all shapes."""
    return torch.compile(flex_attention, dynamic=True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    if position_bias is not None:
        raise NotImplementedError("attention with a position bias")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, attention_mask, scale, softcap, s_aux).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
