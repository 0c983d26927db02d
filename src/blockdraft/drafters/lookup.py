"""Prompt lookup: what followed the last few tokens the last time they appeared, in prompt or output.

Costs nothing to draft, and is right wherever text repeats itself: edits, quotes, summaries, reformatting. The idea is
apoorvumang/prompt-lookup-decoding's; the longest match wins here, the latest of equals.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.drafters.base import Draw
from blockdraft.engine.memory import placed
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal

LONGEST, SHORTEST = 8, 2  # tokens of the match, the anchor included: one token alone repeats by chance


class History:
    """The tokens of one row, indexed by every n-gram in it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its latest appearance

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self.tokens[end - length :])] = end

    def truncate(self, length: int) -> None:
        if length < len(self.tokens):
            kept = self.tokens[:length]
            self.__init__()  # type: ignore[misc]
            self.extend(kept)

    def copy(self) -> "History":
        copied = History()
        copied.tokens, copied._after = list(self.tokens), dict(self._after)
        return copied

    def continuation(self, anchor: int, most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that followed the longest earlier appearance of the last tokens and ``anchor``, and its length.

        Where the copy runs into the end of the text, it goes on with itself: a text that repeats with a short period is
        continued with that period.
        """
        end = len(self.tokens)
        for length in range(min(LONGEST, end + 1), SHORTEST - 1, -1):
            place = self._after.get((*self.tokens[end - length + 1 :], anchor))
            if place is not None:
                text = [*self.tokens[place:], anchor]
                while len(text) < most:
                    text += text[: most - len(text)]
                return text[:most], length
        return [], 0


class LookupDrafter:
    """Proposes the continuation found by lookup, as a chain.

    Args:
        block_size: the anchor and the longest continuation.
    """

    name, method = "lookup", "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, block_size: int = 11):
        self.block_size = block_size
        self.forwards = 0

    def room(self, block_size: int) -> int:
        return block_size

    def reset(self, rows: int, capacity: int) -> None:
        self.histories = [History() for _ in range(rows)]

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        for i, count in enumerate(counts):
            self.histories[row + i].extend(tokens[i, :count].tolist())

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        if draw is not None:
            raise UsageError("lookup copies, it has no probabilities for the rejection rule; use acceptance=match")
        found = [
            history.continuation(anchor, width - 1)[0]
            for history, anchor, width in zip(self.histories, anchors.tolist(), widths, strict=False)
        ]
        most = max(map(len, found))
        tokens = placed([[*copy, *[0] * (most - len(copy))] for copy in found], anchors.device, torch.long)
        return Proposal(tokens.view(len(found), most), [len(copy) + 1 for copy in found])

    def truncate(self, row: int, length: int) -> None:
        self.histories[row].truncate(length)

    def bytes(self) -> int:
        return 0  # Python's lists of the text: no tensor

    def move(self, source: int, target: int) -> None:
        self.histories[target] = self.histories[source].copy()
