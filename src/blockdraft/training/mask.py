"""Many blocks of one sequence in a single drafter forward: who sees whom (method.md 1.5)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.drafters.dflash import visible_rule


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """``[1, anchors * block_size]`` int64 positions of all block rows, block after block."""
    return (anchors[:, None] + torch.arange(block_size, device=anchors.device)).reshape(1, -1)


def block_visibility(
    anchors: Tensor, block_size: int, context: int, causal: bool, window: int | None, documents: Tensor | None = None
) -> Tensor:
    """Bool ``[anchors * block_size, context + anchors * block_size]``.

    A block row sees the context strictly before its anchor, inside its own document, and the rows of its own block; causality
    and window are the rule of decoding, on absolute positions.

    Args:
        anchors: ``[anchors]`` int64 positions.
        context: tokens of the sequence whose features are there.
        documents: ``[context]`` int64, the document of each token in a packed sequence; None: one document.
    """
    device = anchors.device
    block = torch.arange(len(anchors), device=device).repeat_interleave(block_size)
    query = block_positions(anchors, block_size)[0]
    keys = torch.cat([torch.arange(context, device=device), query])
    seen = visible_rule(causal, window)(query, query, query[:, None], keys[None])
    of_context = keys[None, :context] < anchors[block][:, None]
    if documents is not None:
        of_context = of_context & (documents[None] == documents[anchors[block]][:, None])
    of_blocks = block[:, None] == block[None]
    return seen & torch.cat([of_context, of_blocks], dim=1)


class Concatenation:
    """Keys and values for ``DFlash.forward`` without a cache: each layer's injected context, then all block rows."""

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]]):
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        context_keys, context_values = self._context[layer]
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
