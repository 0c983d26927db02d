"""Draft trees over a block drafter's marginals, with copied text as further branches; no retraining.

DDTree (arXiv 2604.12989; liranringel/ddtree ``ddtree.py``): the slots of a block are predicted independently, so a prefix has
the product of its slots' probabilities, the expected number of accepted tokens is the sum of these over the nodes of a tree,
and the best tree of N nodes is the N most probable prefixes. Here the continuation that prompt lookup finds competes for the
same nodes, and how many nodes and slots a round gets is decided by what they cost on this machine (``rules/budget.py``).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.drafters.base import Draw
from blockdraft.drafters.lookup import History
from blockdraft.engine.kernels import grow_tree
from blockdraft.errors import UsageError
from blockdraft.rules.budget import Budget, Pending
from blockdraft.rules.proposal import Proposal

COPIED = 32  # tokens of the longest copy: it may reach beyond the block


def grow(logs: Tensor, words: Tensor, copies: Tensor, copy_logs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``nodes`` most probable prefixes of every row, best first.

    Args:
        logs: ``[rows, slots, k]`` falling log-probabilities of each slot's k most probable words; exact for ``k >= nodes``.
        words: ``[rows, slots, k]`` int64, their ids.
        copies: ``[rows, length]`` int64, a chain of copied tokens; may be longer than the block.
        copy_logs: ``[rows, length]`` log-probability that the chain stands up to there, falling; minus infinity: no token.
            A prefix that both propose has the larger of its two probabilities.
        nodes: most candidates of a row.

    Returns:
        Tokens ``[rows, n]``, parents ``[rows, n]`` as in ``Proposal``, and falling log-probabilities ``[rows, n]``; minus
        infinity marks padding.
    """
    found = grow_tree(logs, words, copies, copy_logs, nodes)
    return found if found is not None else grow_by_levels(logs, words, copies, copy_logs, nodes)


def grow_by_levels(logs: Tensor, words: Tensor, copies: Tensor, copy_logs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """``grow`` in torch, on any device.

    The best prefixes of a level are extended by every word of the next slot, and the best of these stay; no child is more
    probable than its parent, so nothing that is dropped could come back.
    """
    rows, slots, _ = logs.shape
    device = logs.device
    row = torch.arange(rows, device=device)
    score = torch.zeros(rows, 1, device=device)  # of the prefixes of the level before; at first of the anchor
    on_copy = torch.zeros(rows, dtype=torch.long, device=device)  # which of these is the copied chain
    copying = torch.ones(rows, dtype=torch.bool, device=device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []  # scores, tokens, parents; parents count over all levels, the anchor is 0
    first = 0
    reach = copies.shape[1]
    for depth in range(slots):
        width = score.shape[1]
        tokens, extended = words[:, depth], score[:, :, None] + logs[:, None, depth]
        copied = score.new_full((rows, width, 1), float("-inf"))
        there = torch.zeros_like(copying)
        token = tokens.new_zeros(rows)
        if depth < reach:
            token, own = copies[:, depth], extended[row, on_copy]  # own: what the drafter thinks of the chain's continuations
            same = tokens == token[:, None]
            known = own.masked_fill(~same, float("-inf")).amax(dim=1)
            there = copying & ~copy_logs[:, depth].isneginf()
            value = torch.maximum(known, copy_logs[:, depth]).masked_fill(~there, float("-inf"))
            extended[row, on_copy] = own.masked_fill(same & there[:, None], float("-inf"))
            copied[row, on_copy, 0] = value
        pool = torch.cat([extended, copied], dim=2)
        branches = pool.shape[2]
        place = on_copy * branches + branches - 1
        score, chosen = pool.flatten(1).topk(min(nodes, width * branches), dim=1)
        hit = (chosen == place[:, None]) & there[:, None]
        copying, on_copy = hit.any(dim=1), hit.int().argmax(dim=1)
        levels.append((score, torch.cat([tokens, token[:, None]], dim=1).gather(1, chosen % branches), first + chosen // branches))
        first += width
    if reach > slots:  # behind the block the chain is alone
        tail = copy_logs[:, slots:].masked_fill(~copying[:, None], float("-inf"))
        above = torch.arange(first + score.shape[1] - 1, first + score.shape[1] + tail.shape[1] - 1, device=device)
        above = above.expand(rows, -1).clone()
        above[:, 0] = first + on_copy
        levels.append((tail, copies[:, slots:], above))
    return best_nodes(levels, nodes)


def best_nodes(levels: Sequence[tuple[Tensor, Tensor, Tensor]], nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable nodes of a tree, best first.

    Args:
        levels: from the anchor's children on, log-probabilities, tokens and parents ``[rows, n]`` each; parents count over all
            levels, the anchor is 0, and no node is more probable than its parent.
        nodes: most of a row.

    Returns:
        As ``grow``.
    """
    scores, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    rows, device = len(scores), scores.device
    # A stable order: of equals the shallower comes first, so parents stand before their children.
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    place_of = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=device).expand(rows, -1)) + 1
    place_of = torch.cat([place_of.new_zeros(rows, 1), place_of], dim=1)
    order = order[:, :nodes]
    return tokens.gather(1, order), place_of.gather(1, parents.gather(1, order)), scores[:, :nodes]


class Marginals(Protocol):
    """A block drafter: a drafter that can also show the logits of all slots."""

    name: str
    block_size: int
    taps: tuple[int, ...]

    def reset(self, rows: int, capacity: int) -> None: ...
    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None: ...
    def truncate(self, row: int, length: int) -> None: ...
    def move(self, source: int, target: int) -> None: ...
    def bytes(self) -> int: ...
    def likely(self, anchors: Tensor, widths: Sequence[int], most: int) -> tuple[Tensor, Tensor]: ...


class TreeDrafter:
    """A block drafter whose marginals, and copies of earlier text, are proposed as one tree.

    Args:
        drafter: gives the marginals.
        budget: decides slots and nodes of every round.
        copy: look for copies.
    """

    method = "dflash-tree"

    def __init__(self, drafter: Marginals, budget: Budget, copy: bool = True):
        self.drafter, self.budget, self.copy = drafter, budget, copy
        self.name, self.block_size, self.taps = drafter.name, budget.block_size, drafter.taps

    def room(self, block_size: int) -> int:
        return max(self.budget.most + 1, block_size)

    def reset(self, rows: int, capacity: int) -> None:
        self.drafter.reset(rows, capacity)
        self.histories = [History() for _ in range(rows)]
        self.budget.reset(rows)

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        self.drafter.observe(row, tokens, features, counts)
        committed = [found[:count] for found, count in zip(tokens.tolist(), counts, strict=True)]
        for i, found in enumerate(committed):
            self.histories[row + i].extend(found)
        self.budget.learn(row, committed)

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        if draw is not None:
            raise UsageError("a tree's candidates are chosen, not drawn, so the rejection rule has no law for them; use tree=off")
        self.budget.begin(sum(len(history.tokens) for history in self.histories[: len(anchors)]) / len(anchors))
        device = anchors.device
        if self.budget.quiet():
            return self._plain(anchors)
        found = self._find(anchors.tolist(), widths)
        copied = max(len(copy) for copy, _ in found)
        matches = [match for _, match in found]
        slots = min(self.budget.slots(matches, copied), max(widths))
        if slots == 1 and (copied == 0 or not self.budget.copies):
            return self._plain(anchors)
        copies, copy_logs = self._chains(found, copied, device)
        if slots > 1:
            logs, words = self.drafter.likely(anchors, [min(slots, width) for width in widths], self.budget.most)
        else:
            logs, words = copy_logs.new_empty(len(widths), 0, 1), copies.new_empty(len(widths), 0, 1)
        tokens, parents, scores = grow(logs, words, copies, copy_logs, self.budget.most)
        values = scores.tolist()
        counts = self.budget.nodes(values, slots)
        tokens, parents = tokens[:, : max(counts)], parents[:, : max(counts)]
        self.budget.proposed(
            [
                Pending(own[:count], above[:count], log[:count], min(slots, width), *copy)
                for own, above, log, count, width, copy in zip(
                    tokens.tolist(), parents.tolist(), values, counts, widths, found, strict=True
                )
            ]
        )
        return Proposal(tokens, [count + 1 for count in counts], parents)

    def _plain(self, anchors: Tensor) -> Proposal:
        self.budget.proposed([Pending([], [], [], 1, [], 0)] * len(anchors))
        return Proposal(anchors.new_empty(len(anchors), 0), [1] * len(anchors))

    def _find(self, anchors: list[int], widths: Sequence[int]) -> list[tuple[list[int], int]]:
        """For each row, the copied continuation and how many tokens it matches."""
        if not self.copy:
            return [([], 0)] * len(anchors)
        found = []
        for history, anchor, width in zip(self.histories, anchors, widths, strict=False):
            # A row that is narrower than a block is near its end: a long copy would be thrown away.
            found.append(history.continuation(anchor, COPIED if width >= self.block_size else width - 1))
        return found

    def _chains(self, found: list[tuple[list[int], int]], copied: int, device: torch.device) -> tuple[Tensor, Tensor]:
        copies = torch.tensor([[*copy, *[0] * (copied - len(copy))] for copy, _ in found], dtype=torch.long)
        logs = self.budget.copy_logs([match for _, match in found], copied)
        inside = torch.arange(copied) < torch.tensor([len(copy) for copy, _ in found])[:, None]
        return copies.view(len(found), copied).to(device), logs.masked_fill(~inside, float("-inf")).to(device)

    def truncate(self, row: int, length: int) -> None:
        self.budget.forget(row)
        self.drafter.truncate(row, length)
        self.histories[row].truncate(length)

    def bytes(self) -> int:
        return self.drafter.bytes()

    def move(self, source: int, target: int) -> None:
        self.drafter.move(source, target)
        self.histories[target] = self.histories[source].copy()
        self.budget.move(source, target)
