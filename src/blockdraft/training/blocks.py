"""Blocks: the module that is trained. All blocks of packed rows go through the drafter in one forward (method.md 1.5)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.attention import Mask, additive
from blockdraft.drafters.dflash import DFlash
from blockdraft.training.mask import Concatenation, Visibility


class Blocks(nn.Module):
    """The drafter network over packed rows, instead of over a cache.

    Args:
        network: the drafter.
        flex: attend with FlexAttention and block masks; else SDPA and additive masks.
        dropout: of the fused features, while training.
    """

    def __init__(self, network: DFlash, flex: bool = False, dropout: float = 0.0):
        super().__init__()
        self.network, self.flex, self.dropout = network, flex, dropout

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
        hidden = self.network(embeddings, visibility.query_positions, context, masks)
        return hidden.unflatten(1, (anchors.shape[1], block_size))

    def _masks(self, visibility: Visibility, dtype: torch.dtype) -> list[Mask]:
        rules = list(zip(self.network.config.causal, self.network.config.windows, strict=True))
        if self.flex:
            made: dict[tuple[bool, int | None], Mask] = {rule: visibility.block_mask(*rule) for rule in set(rules)}
        else:
            made = {rule: additive(visibility.seen(*rule), dtype) for rule in set(rules)}
        return [made[rule] for rule in rules]


def block_embeddings(network: DFlash, embed: Callable[[Tensor], Tensor], ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Rows of the target's embedding ``[rows, anchors * block, hidden]``: each anchor's token, then mask tokens."""
    tokens = ids.gather(1, anchors)
    block = tokens[..., None].expand(-1, -1, block_size).clone()
    block[..., 1:] = network.config.mask_token_id
    return embed(block.flatten(1)) * network.config.embedding_scale
