"""Blocks: the module that is trained. All blocks of packed rows go through the drafter in one forward (arXiv 2602.06036, 4.2)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.network import DFlash
from blockdraft.engine.attention import BlockedMask, Mask, additive
from blockdraft.training.mask import Concatenation, Visibility


class Blocks(nn.Module):
    """The drafter network over packed rows, instead of over a cache.

    Args:
        network: the drafter.
        attention: "flex" (FlexAttention, for GPUs), "blocked" (context and own block apart, for CPUs), or "sdpa" (a dense mask).
        dropout: of the fused features, while training.
    """

    def __init__(self, network: DFlash, attention: str = "blocked", dropout: float = 0.0):
        super().__init__()
        self.network, self.attention, self.dropout = network, attention, dropout

    def forward(
        self, embeddings: Tensor, features: Tensor, anchors: Tensor, positions: Tensor, documents: Tensor, block_size: int
    ) -> Tensor:
        """Hidden states ``[rows, anchors, block, hidden]`` after the drafter's final norm.

        Args:
            embeddings: ``[rows, anchors * block, hidden]`` of anchors and mask tokens, scaled as the drafter wants.
            features: ``[rows, context, taps * hidden]`` of the target.
            anchors: ``[rows, anchors]`` int64, ascending.
            positions, documents: ``[rows, context]`` int64, as in Batch.
        """
        visibility = Visibility(anchors, block_size, positions, documents)
        fused = F.dropout(self.network.fuse(features), self.dropout, self.training)
        context = Concatenation(self.network.inject(fused, positions))
        masks = self._masks(visibility, embeddings.dtype)
        hidden = self.network(embeddings, visibility.query_positions, context, masks, block_size)
        return hidden.unflatten(1, (anchors.shape[1], block_size))

    def _masks(self, visibility: Visibility, dtype: torch.dtype) -> list[Mask]:
        rules = list(zip(self.network.config.causal, self.network.config.windows, strict=True))
        made = {rule: self._mask(visibility, rule, dtype) for rule in set(rules)}
        return [made[rule] for rule in rules]

    def _mask(self, visibility: Visibility, rule: tuple[bool, int | None], dtype: torch.dtype) -> Mask:
        if self.attention == "flex":
            return visibility.block_mask(*rule)
        seen = visibility.seen(*rule)
        return additive(seen, dtype) if self.attention == "sdpa" else self._blocked(visibility, seen, dtype)

    @staticmethod
    def _blocked(visibility: Visibility, seen: Tensor, dtype: torch.dtype) -> BlockedMask:
        """The same mask without the other blocks' keys, which nobody sees."""
        context, block = visibility.context, visibility.block_size
        own = seen[..., context:].unflatten(3, (-1, block)).unflatten(2, (-1, block))  # [rows, 1, blocks, slots, blocks, slots]
        own = own.diagonal(dim1=2, dim2=4).movedim(-1, 2)
        return BlockedMask(additive(seen[..., :context], dtype), additive(own, dtype))


def block_embeddings(
    network: DFlash,
    embed: Callable[[Tensor], Tensor],
    ids: Tensor,
    anchors: Tensor,
    block_size: int,
    shown: Tensor | None = None,
) -> Tensor:
    """Rows of the target's embedding ``[rows, anchors * block, hidden]``: each anchor's token, then mask tokens.

    Args:
        shown: ``[rows, anchors, block - 1]`` bool, slots that hold the row's own token instead; None: none.
    """
    tokens = ids.gather(1, anchors)
    block = tokens[..., None].expand(-1, -1, block_size).clone()
    block[..., 1:] = network.config.mask_token_id
    if shown is not None:
        index = (anchors[..., None] + torch.arange(1, block_size, device=ids.device)).clamp(max=ids.shape[1] - 1)
        own = ids.gather(1, index.flatten(1)).view(shown.shape)
        block[..., 1:] = torch.where(shown, own, block[..., 1:])
    return embed(block.flatten(1)) * network.config.embedding_scale
