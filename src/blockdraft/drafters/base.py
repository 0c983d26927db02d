"""The protocol of a drafter: reset, observe, propose."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from blockdraft.rules.proposal import Proposal

Draw = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Draws one token per slot: logits ``[rows, slots, vocabulary]`` -> (tokens ``[rows, slots]``, probabilities like the logits)."""


class Drafter(Protocol):
    """Proposes tokens behind the anchor. Never sees the target, only tokens, features and what it borrowed.

    Attributes:
        name: for results.
        method: what results call decoding with it.
        block_size: slots of a block, the anchor included, that it was trained for.
        taps: the target layers whose outputs it wants; empty: none.
    """

    name: str
    method: str
    block_size: int
    taps: tuple[int, ...]

    def room(self, block_size: int) -> int:
        """Nodes of the widest proposal at this block size, the anchor included: the caches keep that much room."""

    def reset(self, rows: int, capacity: int) -> None:
        """Begin with empty rows that can hold ``capacity`` positions each."""

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        """Take in committed tokens of the rows ``row, row + 1, ...``.

        Args:
            row: the first row.
            tokens: ``[rows, most]`` int64.
            features: ``[rows, most, taps * hidden]`` of the same tokens, None if there are no taps.
            counts: how many of each row's tokens are committed; the rest is padding.
        """

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        """Candidates for the rows ``0 .. len(anchors) - 1``.

        Args:
            anchors: ``[rows]`` int64, emitted but not yet observed.
            widths: for each row the most nodes wanted, the anchor included (>= 1).
            draw: how to draw from the drafter's law, with its probabilities; None: take the most probable.
        """

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's observations from position ``length`` on."""

    def bytes(self) -> int:
        """Memory of its weights, packed copies and caches."""

    def move(self, source: int, target: int) -> None:
        """Let row ``target`` continue what row ``source`` was."""
