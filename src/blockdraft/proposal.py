"""Proposal: what a drafter puts before the target, as a tree of candidates behind the anchor."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Proposal:
    """Candidates for ``rows`` sequences. Node 0 is the anchor, node ``i + 1`` is candidate ``i``.

    Attributes:
        tokens: ``[rows, candidates]`` int64.
        widths: for each row, how many of its nodes count, the anchor included; the rest is padding.
        parents: ``[rows, candidates]`` int64, the parent *node* of each candidate, always an earlier node; None: a chain.
        probabilities: ``[rows, candidates, vocabulary]`` the law each candidate was drawn from; only the rejection rule
            needs it, and only for chains.
    """

    tokens: Tensor
    widths: list[int]
    parents: Tensor | None = None
    probabilities: Tensor | None = None

    def depths(self) -> Tensor:
        """``[rows, candidates]`` int64: steps from the anchor."""
        rows, candidates = self.tokens.shape
        if self.parents is None:
            return torch.arange(1, candidates + 1, device=self.tokens.device).expand(rows, -1)
        depths = torch.zeros(rows, candidates + 1, dtype=torch.long, device=self.tokens.device)
        for i in range(candidates):
            depths[:, i + 1] = depths.gather(1, self.parents[:, i : i + 1])[:, 0] + 1
        return depths[:, 1:]

    def visible(self) -> Tensor | None:
        """``[rows, 1 + candidates, 1 + candidates]`` bool: each node sees its ancestors and itself; None: a plain chain.

        A padding node sees itself alone and nobody sees it, so that no row of the attention is empty.
        """
        rows, candidates = self.tokens.shape
        nodes = candidates + 1
        device = self.tokens.device
        if self.parents is None:
            if all(width == nodes for width in self.widths):
                return None
            seen = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().repeat(rows, 1, 1)
        else:
            seen = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
            row = torch.arange(rows, device=device)
            for i in range(candidates):
                seen[:, i + 1] |= seen[row, self.parents[:, i]]
        real = torch.arange(nodes, device=device) < torch.tensor(self.widths, device=device)[:, None]
        seen &= real[:, None, :] & real[:, :, None]
        return seen | torch.eye(nodes, dtype=torch.bool, device=device)
