"""Many blocks of packed rows in a single drafter forward: who sees whom (arXiv 2602.06036, section 4.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from blockdraft.drafters.injection import visible_rule


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """``[rows, anchors * block_size]`` int64 positions of all block rows, block after block, of anchors ``[rows, anchors]``."""
    return (anchors[..., None] + torch.arange(block_size, device=anchors.device)).flatten(-2)


class Visibility:
    """A block row sees the context strictly before its anchor, inside its own document, and the rows of its own block.

    Causality and window are the rule of decoding, on positions inside the document.

    Args:
        anchors: ``[rows, anchors]`` int64, indices into the packed row.
        block_size: slots of a block.
        positions: ``[rows, context]`` int64, position of each context token in its document.
        documents: ``[rows, context]`` int64, number of each token's document; -1 is padding.
    """

    def __init__(self, anchors: Tensor, block_size: int, positions: Tensor, documents: Tensor):
        self.anchors, self.block_size, self.positions, self.documents = anchors, block_size, positions, documents
        self.queries, self.context = anchors.shape[1] * block_size, documents.shape[1]
        self.query_positions = block_positions(positions.gather(1, anchors), block_size)
        self.key_positions = torch.cat([positions, self.query_positions], dim=1)
        self.query_documents = documents.gather(1, anchors)

    def seen(self, causal: bool, window: int | None) -> Tensor:
        """Bool ``[rows, 1, queries, context + queries]``."""
        device = self.anchors.device
        row = torch.arange(len(self.anchors), device=device)[:, None, None]
        query = torch.arange(self.queries, device=device)[None, :, None]
        key = torch.arange(self.context + self.queries, device=device)[None, None, :]
        return self._rule(causal, window)(row, row, query, key)[:, None]

    def block_mask(self, causal: bool, window: int | None) -> BlockMask:
        """The same for FlexAttention, which skips what nobody sees; ascending anchors make that most of it."""
        device = str(self.anchors.device)
        return create_block_mask(
            self._rule(causal, window), len(self.anchors), None, self.queries, self.context + self.queries, device=device
        )

    def _rule(self, causal: bool, window: int | None):  # type: ignore[no-untyped-def]
        of_decoding = visible_rule(causal, window)

        def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, of_context = query // self.block_size, key < self.context
            token, own = key.clamp(max=self.context - 1), (key - self.context).clamp(min=0) // self.block_size
            before = (token < self.anchors[row, block]) & (self.documents[row, token] == self.query_documents[row, block])
            near = of_decoding(row, head, self.query_positions[row, query], self.key_positions[row, key])
            return near & ((of_context & before) | (~of_context & (own == block)))

        return rule


class Concatenation:
    """Keys and values for ``DFlash.forward`` without a cache: each layer's injected context, then all block rows."""

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]]):
        self._context = context

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        context_keys, context_values = self._context[layer]
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
