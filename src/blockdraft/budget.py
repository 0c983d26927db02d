"""Budget: how many slots to draft and how many candidates to verify, by what they cost here and what they brought lately.

A round takes the time of one draft and one verification and brings the accepted tokens and one more. The expected number is the
sum of the candidates' probabilities (arXiv 2604.12989), the times were measured on this machine (``probe.py``), and the best
round is the one with the most expected tokens per second (the criterion of CAST, arXiv 2610.00321). The drafter's probabilities
are corrected by what became of candidates of like probability before.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MOST = 64  # candidates of the largest tree
BIN = 0.5  # nats of log-probability that share one correction
BINS = 24
TRUST = 20.0  # outcomes that the drafter's own probability weighs as much as
LONG_MATCH = 8  # matches of this many tokens and more are one class
WEIGHT, TRIAL_WEIGHT = 0.08, 0.3  # of a round's outcome in the averages; of one after a pause
FIRST_PAUSE, LONGEST_PAUSE, TRIALS = 4, 64, 2  # rounds


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by the tokens in it; measured at a few places, a straight line between and behind them.

    Attributes:
        verify: ``(tokens, seconds)`` of the target, rising; the first is one token: a plain step.
        draft: ``(slots, seconds)`` of the drafter, rising.
    """

    verify: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]

    def of_verify(self, tokens: int) -> float:
        return _between(self.verify, tokens)

    def of_draft(self, slots: int) -> float:
        """Nothing is drafted in a block of one slot, the anchor."""
        return _between(self.draft, slots) if slots > 1 else 0.0


def _between(points: Sequence[tuple[int, float]], x: int) -> float:
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (x, -1.0)), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return max(low + (high - low) * (x - left) / (right - left), points[0][1] if x >= points[0][0] else 0.0)


class Budget:
    """Decides every round's shape and learns from its outcome.

    Args:
        costs: of this target and drafter on this machine; None with ``fixed``.
        block_size: slots of the drafter's block, the anchor included.
        fixed: always draft the whole block and verify this many candidates; None: decide by the costs.

    Attributes:
        most: candidates of the largest tree.
    """

    def __init__(self, costs: Costs | None, block_size: int, fixed: int | None = None):
        assert (costs is None) == (fixed is not None), "a budget is fixed, or decided by costs"
        self.costs, self.block_size, self.fixed = costs, block_size, fixed
        self.most = fixed or MOST
        self._nodes = Rates([math.exp(-BIN * (i + 0.5)) for i in range(BINS)])
        self._copies = Rates([0.9 - 0.7 * 0.75**length for length in range(LONG_MATCH + 1)])
        # How likely a path reaches each depth, and how many tokens a round verifies: at first hopeful, so that drafting is tried.
        self._reach = [0.8**depth for depth in range(1, block_size)]
        self._verified = 8.0
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Begin with ``rows`` other rows; what was learned of drafter and copies stays."""
        self._pending: list[Pending | None] = [None] * rows
        self._resting, self._pause, self._trials = 0, FIRST_PAUSE, 0

    # ---- what a round looks like

    def slots(self, matches: Sequence[int], copied: int) -> int:
        """Slots to draft, the anchor included; 1: nothing, so a plain step unless something can be copied.

        Where no drafted shape beats the plain step, drafting rests; after a pause it gets ``TRIALS`` rounds to show that it pays
        again, and the next pause is twice as long if it does not.

        Args:
            matches: for each row, how many tokens its copy matches; 0: no copy.
            copied: tokens of the longest copy.
        """
        if self.fixed is not None or self.costs is None:
            return self.block_size
        rows = len(matches)
        copies = sum(sum(math.exp(x) for x in self._copy_chain(match, copied)) for match in matches if match)
        best, best_rate = 1, 0.0
        for slots in sorted({self.block_size, (self.block_size + 1) // 2}):
            if slots < 2:
                continue
            gain = rows * sum(self._reach[: slots - 1])
            seconds = self.costs.of_draft(rows * slots) + self.costs.of_verify(round(rows * self._verified))
            if (rate := (rows + max(gain, copies)) / seconds) > best_rate:
                best, best_rate = slots, rate
        without = (rows + copies) / self.costs.of_verify(rows + (round(copies) * 2 if copies else 0))
        if best_rate >= without:
            self._resting, self._pause, self._trials = 0, FIRST_PAUSE, 0
            return best
        if copies:  # copying alone is better now, which says nothing about drafting elsewhere
            return 1
        return self._rest()

    def _rest(self) -> int:
        if self._trials:
            self._trials -= 1
            return self.block_size
        self._resting += 1
        if self._resting <= self._pause:
            return 1
        self._resting, self._pause, self._trials = 0, min(2 * self._pause, LONGEST_PAUSE), TRIALS - 1
        return self.block_size

    def copy_logs(self, matches: Sequence[int], copied: int) -> Tensor:
        """``[rows, copied]`` log-probabilities that a copy stands up to there; minus infinity without a match."""
        none = [float("-inf")] * copied
        chains = [list(self._copy_chain(match, copied)) if match else none for match in matches]
        return torch.tensor(chains).view(len(matches), copied)

    def _copy_chain(self, match: int, copied: int) -> Iterator[float]:
        """Every copied token that stands makes the match longer."""
        log = 0.0
        for i in range(copied):
            log += math.log(self._copies.of(min(match + i, LONG_MATCH)))
            yield log

    def nodes(self, scores: Sequence[Sequence[float]], slots: int) -> list[int]:
        """Candidates to verify of each row, by the falling log-probabilities of all of them; minus infinity: none."""
        there = [
            bisect_left(row, float("inf"), key=lambda score: float("inf") if score == float("-inf") else 0.0) for row in scores
        ]
        if self.fixed is not None or self.costs is None:
            return there
        rows = len(scores)
        expected = [0.0] * (self.most + 1)
        for row in scores:
            gained = 0.0
            for i in range(self.most):
                if i < len(row):
                    gained += self._nodes.of(_bin(row[i])) if row[i] > float("-inf") else 0.0
                expected[i + 1] += gained
        draft = self.costs.of_draft(rows * slots) if slots > 1 else 0.0
        sizes = [tokens - 1 for tokens, _ in self.costs.verify if tokens - 1 <= self.most]
        costs = self.costs
        best = max(sizes, key=lambda n: (rows + expected[n]) / (draft + costs.of_verify(rows * (n + 1))))
        return [min(best, count) for count in there]

    # ---- what became of it

    def proposed(self, pending: Sequence["Pending"]) -> None:
        """Remember what the rows ``0, 1, ...`` are about to verify."""
        self._pending[: len(pending)] = pending

    def learn(self, row: int, committed: Sequence[Sequence[int]]) -> None:
        """Take in the tokens that stood: for rows ``row, row + 1, ...`` the anchor and the accepted ones."""
        for i, tokens in enumerate(committed, row):
            pending, self._pending[i] = self._pending[i], None
            if pending is None:  # a prompt
                continue
            self._learn_nodes(pending, tokens[1:])
            self._learn_copy(pending, tokens[1:])
            if pending.slots > 1:
                weight = TRIAL_WEIGHT if self._pause > FIRST_PAUSE else WEIGHT
                for depth in range(pending.slots - 1):
                    self._reach[depth] += weight * ((len(tokens) - 1 > depth) - self._reach[depth])
                self._verified += weight * (len(pending.tokens) + 1 - self._verified)

    def _learn_nodes(self, pending: "Pending", accepted: Sequence[int]) -> None:
        path, node = set(), 0
        for token in accepted:
            node = pending.children[node, token]
            path.add(node)
        for i, score in enumerate(pending.scores, 1):
            self._nodes.add(_bin(score), i in path)

    def _learn_copy(self, pending: "Pending", accepted: Sequence[int]) -> None:
        """A copied token is judged if the path came to it and either took it or had it among its candidates."""
        node = 0
        for i, token in enumerate(pending.copy):
            if (node, token) not in pending.children:
                return
            stands = i < len(accepted) and accepted[i] == token
            self._copies.add(min(pending.match + i, LONG_MATCH), stands)
            if not stands:
                return
            node = pending.children[node, token]

    def forget(self, row: int) -> None:
        """What the row was about to verify never ran to its end."""
        if row < len(self._pending):
            self._pending[row] = None

    def move(self, source: int, target: int) -> None:
        self._pending[target] = self._pending[source]


@dataclass
class Pending:
    """What a row verifies: candidates with parents and log-probabilities (``grow``), slots drafted for it, its copy and match."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    slots: int
    copy: list[int]
    match: int

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """The node that a node and a token lead to."""
        return {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True), 1)}


class Rates:
    """How often things of each class came true, beginning with what was expected of them."""

    def __init__(self, expected: Sequence[float]):
        self._hits = [TRUST * share for share in expected]
        self._trials = [TRUST] * len(expected)

    def of(self, kind: int) -> float:
        return self._hits[kind] / self._trials[kind]

    def add(self, kind: int, true: bool) -> None:
        self._hits[kind] += true
        self._trials[kind] += 1


def _bin(score: float) -> int:
    return min(int(-score / BIN), BINS - 1)
