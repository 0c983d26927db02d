"""What DFlash 2 adds to DFlash (inco.ai/blog/dflash2; z-lab/dflash ``DFlash2DraftModel``): convolutions along the block around
attention and MLP, and a selector that picks each slot's word among a few, given the word before it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Module):
    """Two short causal convolutions along a block, before and behind a sublayer; both kernels are moved by what the sublayer reads.

    ``y[t, c] = sum over o of (base[side, o, c] + delta[t, side, o, c // group]) * x[t - o, c]``, zero left of the block.

    Args:
        hidden: channels.
        taps: of a kernel; ``o`` runs over them.
        group: channels that share a delta.
    """

    def __init__(self, hidden: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        identity = torch.zeros(2, taps, hidden)
        identity[:, 0] = 1  # initial weights change nothing
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, width: int | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``x [rows, slots, hidden]`` convolved, and the convolution for what the sublayer makes of it.

        Args:
            width: slots of a block, where several stand side by side; None: it is one.
        """
        deltas = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x, deltas, 0, width), lambda y: self._convolve(y, deltas, 1, width)

    def _convolve(self, x: Tensor, deltas: Tensor, side: int, width: int | None) -> Tensor:
        blocks = x.unflatten(1, (-1, width or x.shape[1])).unflatten(-1, (-1, self.group))  # [rows, blocks, slots, groups, group]
        out = torch.zeros_like(blocks)
        for offset in range(self.taps):
            moved = blocks if offset == 0 else F.pad(blocks[:, :, :-offset], (0, 0, 0, 0, offset, 0))
            delta = deltas[:, :, side, offset].unflatten(1, blocks.shape[1:3])[..., None]
            out = out + (self.base_kernel[side, offset].view(-1, self.group).to(x.dtype) + delta) * moved
        return out.flatten(3).flatten(1, 2)


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by the word before them.

    Args:
        hidden: size of the drafter's states.
        vocabulary: of the target.
        rank: of the codebooks.
        candidates: of a slot, the most likely words.
    """

    def __init__(self, hidden: int, vocabulary: int, rank: int, candidates: int):
        super().__init__()
        self.candidates = candidates
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def scores(self, logits: Tensor, words: Tensor, projected: Tensor, before: Tensor) -> Tensor:
        """``[rows, candidates]``: logits plus how well each candidate follows.

        Args:
            logits: ``[rows, candidates]``.
            words: ``[rows, candidates]`` int64.
            projected: ``[rows, rank]``, the slot's state through ``hidden_projection``.
            before: ``[rows]`` int64, the word before.
        """
        wanted = self.predecessor_codebook[before] * projected
        return logits + torch.einsum("br,bkr->bk", wanted, self.successor_codebook[words]).to(logits.dtype)
