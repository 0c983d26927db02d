"""Proposal: what a drafter puts before the target, as a tree of candidates behind the anchor."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blockdraft.engine.kernels import see_ancestors
from blockdraft.engine.memory import placed


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
        if self.parents is None:
            rows, candidates = self.tokens.shape
            return torch.arange(1, candidates + 1, device=self.tokens.device).expand(rows, -1)
        return self._lineage[1]

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
            seen = self._lineage[0]
        if all(width == nodes for width in self.widths):
            return seen
        real = torch.arange(nodes, device=device) < placed(self.widths, device)[:, None]
        seen = seen & real[:, None, :] & real[:, :, None]
        return seen | torch.eye(nodes, dtype=torch.bool, device=device)

    @cached_property
    def _lineage(self) -> tuple[Tensor, Tensor]:
        """``[rows, nodes, nodes]`` bool, whether the second node is the first one or an ancestor of it; and the depths."""
        assert self.parents is not None
        return see_ancestors(self.parents) or self._squared(self.parents)

    @staticmethod
    def _squared(parents: Tensor) -> tuple[Tensor, Tensor]:
        """The same on any device: "self or parent", squared until it reaches the root: as many small products as a tree's depth
        has binary digits."""
        rows, candidates = parents.shape
        seen = torch.eye(candidates + 1, device=parents.device).repeat(rows, 1, 1)
        seen[:, 1:].scatter_(2, parents[..., None], 1.0)
        for _ in range(candidates.bit_length()):
            seen = (seen @ seen).clamp_(max=1.0)
        return seen > 0, (seen[:, 1:] > 0).sum(-1) - 1
