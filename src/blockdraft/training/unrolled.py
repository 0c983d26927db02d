"""Unrolled: the module that is trained for EAGLE-3. It drafts several tokens in a row in training as it will in decoding, from
its own output (*training-time test*, arXiv 2503.01840 section 3.2; SafeAILab/EAGLE ``cnets.py``).

    step 0: the whole row, from features      -> outputs one position before each anchor
    step s: the token s behind each anchor, beside the last output, sees step 0 before its anchor and its own earlier steps
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.eagle3 import Eagle3
from blockdraft.engine.attention import BlockedMask, additive


class Unrolled(nn.Module):
    """The drafter network over packed rows, instead of over a cache.

    Args:
        network: the drafter.
        dropout: of the fused features, while training.
    """

    def __init__(self, network: Eagle3, dropout: float = 0.0):
        super().__init__()
        self.network, self.dropout = network, dropout

    def forward(
        self, embeddings: Tensor, features: Tensor, anchors: Tensor, positions: Tensor, documents: Tensor, block_size: int
    ) -> Tensor:
        """Normed outputs ``[rows, anchors, block - 1, hidden]``: what the head reads for each token behind each anchor.

        Args:
            embeddings: ``[rows, context, hidden]`` of the row's tokens.
            features: ``[rows, context, taps * hidden]`` of the target.
            anchors: ``[rows, anchors]`` int64; what lies behind the first token of a document has no features before it, and its
                outputs mean nothing.
            positions, documents: ``[rows, context]`` int64, as in Batch.
        """
        steps = Steps()
        fused = F.dropout(self.network.fc(features), self.dropout, self.training)
        same = documents[:, :, None] == documents[:, None, :]
        seen = same & torch.ones_like(same[0]).tril()
        of_rows = self.network(embeddings.roll(-1, 1), fused, positions, steps, additive(seen[:, None], embeddings.dtype))
        last = (anchors - 1).clamp(min=0)  # the newest position with features
        start, output = positions.gather(1, last), _take(of_rows, last)
        context = additive(_take(seen, last)[:, None], embeddings.dtype)
        outputs = [output]
        for step in range(1, block_size - 1):
            embedded = _take(embeddings, (anchors + step).clamp(max=embeddings.shape[1] - 1))
            own = context.new_zeros(len(anchors), 1, anchors.shape[1], 1, step)
            output = self.network(embedded, output, start + step, steps, BlockedMask(context, own))
            outputs.append(output)
        return self.network.norm(torch.stack(outputs, dim=2))


class Steps:
    """Keys and values for ``Eagle3.forward`` without a cache: those of step 0, then each anchor's own of the later steps."""

    def __init__(self) -> None:
        self._context: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        if self._context is None:
            self._context = keys, values
            return self._context
        self._own.append((keys, values))
        own = (torch.stack(tensors, dim=3).flatten(2, 3) for tensors in zip(*self._own, strict=True))
        all_keys, all_values = (torch.cat(pair, dim=2) for pair in zip(self._context, own, strict=True))
        return all_keys, all_values


def _take(source: Tensor, places: Tensor) -> Tensor:
    """``source[row, places[row]]``: ``[rows, n, width]`` of ``[rows, context, width]``."""
    return source.gather(1, places[..., None].expand(-1, -1, source.shape[-1]))
