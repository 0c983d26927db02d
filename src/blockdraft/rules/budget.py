"""Budget: how many slots to draft and how many candidates to verify, by what they cost here and what they brought lately.

A round takes the time of one draft and one verification and brings the accepted tokens and one more. The expected number is the
sum of the candidates' probabilities (arXiv 2604.12989), the times were measured on this machine (``decoding/probe.py``), and the
best round is the one with the most expected tokens per second (the criterion of CAST, arXiv 2610.00321). The drafter's
probabilities are corrected by what became of candidates of like probability before, and the times by how long rounds really took.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

MOST = 64  # candidates of the largest tree
BIN = 0.5  # nats of log-probability that share one correction
BINS = 24
TRUST = 20.0  # outcomes that the drafter's own probability weighs as much as
LONG_MATCH = 8  # matches of this many tokens and more are one class
NO_COPY, COPY, LONG_COPY = range(3)  # kinds of text: what drafting brings differs where a copy goes along
PLAIN, COPIED, DRAFTED = range(3)  # kinds of rounds: nothing to verify, copies alone, or a draft with them
WEIGHT, TRIAL_WEIGHT = 0.08, 0.3  # of a round's outcome in the averages, once there are some; of one after a pause
FIRST_ROUNDS = 3  # outcomes that what was expected at first weighs as much as
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # rounds
SHARE = 0.02  # of the time of plain rounds that trials of one row may take from them; a trial of many rows tells as much as many
SAVED = 4.0  # plain rounds' time that may be saved up for trials, and is there at first
LOOK = 4  # rows that add one to the plain rounds that follow a plain round without another look
MARGIN = 1.03  # drafting must look better than no drafting by this much: what looks best of several is overestimated

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by the tokens in it; measured at a few places, a straight line between and behind them.

    Attributes:
        verify: ``(tokens, seconds)`` of the target, rising; the first is one token: a plain step.
        draft: ``(slots, seconds)`` of the drafter, rising.
        context: tokens in the cache while this was measured.
        longer: the same places in a longer context; None: as if the context did not matter.
    """

    verify: Points
    draft: Points
    context: int = 0
    longer: "Costs | None" = None

    def at(self, context: float) -> "Costs":
        """With so many tokens in the cache: on the straight line through both contexts, and never below the shorter one."""
        if self.longer is None or context <= self.context:
            return self
        share = (context - self.context) / (self.longer.context - self.context)

        def along(near: Points, far: Points) -> Points:
            return tuple((x, low + share * max(0.0, high - low)) for (x, low), (_, high) in zip(near, far, strict=True))

        return Costs(along(self.verify, self.longer.verify), along(self.draft, self.longer.draft))

    def of_verify(self, tokens: int) -> float:
        return _between(self.verify, tokens)

    def of_draft(self, slots: int, rows: int = 1) -> float:
        """Of blocks of so many slots each; nothing is drafted in a block of one slot, the anchor."""
        return _between(self.draft, rows * slots) if slots > 1 else 0.0


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
        clock: in seconds, to correct the costs by; None: they are taken as they are.

    Attributes:
        most: candidates of the largest tree.
        costs: at the context of the round that runs.
        copies: whether copies are worth verifying where nothing is drafted.
    """

    def __init__(self, costs: Costs | None, block_size: int, fixed: int | None = None, clock: Callable[[], float] | None = None):
        assert (costs is None) == (fixed is not None), "a budget is fixed, or decided by costs"
        self._measured, self.block_size, self.fixed, self._clock = costs, block_size, fixed, clock
        self.costs, self.copies = costs, True
        self.most = fixed or MOST
        self._nodes = Rates([math.exp(-BIN * (i + 0.5)) for i in range(BINS)])
        self._copies = Rates([0.9 - 0.7 * 0.75**length for length in range(LONG_MATCH + 1)])
        self._paces = [Pace(), Pace(), Pace()]
        self._pause, self._spare, self._share = FIRST_PAUSE, SAVED, SHARE
        self._drafted = [Drafted(chance, block_size) for chance in (0.65, 0.65, 0.8)]
        self.reset(0)

    def reset(self, rows: int) -> None:
        """Begin with ``rows`` other rows; what was learned of drafter and copies stays, but a pause is cut short."""
        self._pending: list[Pending | None] = [None] * rows
        self._began: float | None = None
        self._round: tuple[int, float] | None = None  # the one that runs: its kind and expected seconds
        self._resting, self._pause = 0, max(FIRST_PAUSE, self._pause // 4)
        self._silent = 0  # plain rounds that follow without a look

    # ---- what a round looks like

    def quiet(self) -> bool:
        """Whether a round is plain without another look: with many rows, looking takes longer than it can bring."""
        if self._silent == 0:
            return False
        self._silent -= 1
        self._resting += 1
        self._spare += self._share
        return True

    def slots(self, matches: Sequence[int], copied: int) -> int:
        """Slots to draft, the anchor included; 1: nothing, so a plain step unless something can be copied.

        Where no drafted shape beats the plain step, drafting rests; after a pause it gets a round to show that it pays again, and
        the next pause is twice as long if it does not.

        Args:
            matches: for each row, how many tokens its copy matches; 0: no copy.
            copied: tokens of the longest copy.
        """
        if self.fixed is not None or self.costs is None:
            return self.block_size
        rows, kinds = len(matches), [_kind(match) for match in matches]
        self._share = SHARE / rows
        verified = round(sum(self._drafted[kind].verified for kind in kinds))
        best, best_rate = 1, 0.0
        for slots in sorted({self.block_size, (self.block_size + 1) // 2}):
            if slots < 2:
                continue
            gain = sum(self._drafted[kind].gain(slots) for kind in kinds)
            seconds = self._paces[DRAFTED].of(self.costs.of_draft(slots, rows) + self.costs.of_verify(verified))
            if (rate := (rows + gain) / seconds) > best_rate:
                best, best_rate = slots, rate
        without, self.copies = self._rate_without(self.costs, matches, copied)
        if best_rate >= MARGIN * without:
            self._resting, self._pause = 0, FIRST_PAUSE
            self._spare = min(self._spare + best_rate / without - 1, SAVED)
            return best
        if set(kinds) == {LONG_COPY}:  # copying alone is better now, which says nothing about drafting elsewhere
            return 1
        trial = self.costs.of_draft(self.block_size, rows) + self.costs.of_verify(verified)
        slots = self._rest(trial / self.costs.of_verify(rows) - 1)
        self._silent = rows // LOOK if slots == 1 and not self.copies else 0
        return slots

    def _rate_without(self, costs: Costs, matches: Sequence[int], copied: int) -> tuple[float, bool]:
        """Tokens per second of a round without a draft, and whether it copies: the best number of tokens for all rows."""
        rows, paces = len(matches), self._paces
        chains = [[math.exp(log) for log in self._copy_chain(match, copied)] for match in matches if match]
        gained = [0.0, *accumulate(sum(chain[i] for chain in chains) for i in range(copied if chains else 0))]
        sizes = {min(tokens - 1, len(gained) - 1) for tokens, _ in costs.verify}
        plain = rows / paces[PLAIN].of(costs.of_verify(rows))
        rates = [(rows + gained[size]) / paces[COPIED].of(costs.of_verify(rows * (size + 1))) for size in sizes if size]
        best = max(rates, default=0.0)
        return max(plain, best), best >= MARGIN * plain

    def _rest(self, dearer: float) -> int:
        """Plain rounds, and after a pause a trial; the dearer a trial is than a plain round, the longer the pause.

        With many rows a trial takes as long as many plain rounds: it waits until it takes a small share of them, and is left out
        where not even a block that stands whole would pay.
        """
        self._resting += 1
        self._spare = min(self._spare + self._share, max(SAVED, dearer))
        if self._resting <= self._pause * max(1.0, dearer) or self._spare < dearer or dearer + 1 >= self.block_size:
            return 1
        self._resting, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        self._spare -= dearer
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
        draft = self.costs.of_draft(slots, rows)
        sizes = [tokens - 1 for tokens, _ in self.costs.verify if tokens - 1 <= self.most]
        costs = self.costs
        kinds = [DRAFTED if slots > 1 else COPIED if n else PLAIN for n in range(self.most + 1)]
        best = max(sizes, key=lambda n: (rows + expected[n]) / self._paces[kinds[n]].of(draft + costs.of_verify(rows * (n + 1))))
        return [min(best, count) for count in there]

    # ---- what became of it

    def begin(self, context: float = 0) -> None:
        """A round begins, over so many tokens on the mean of its rows: its draft and its verification are timed together."""
        self.costs = self._measured.at(context) if self._measured is not None else None
        self._began = self._clock() if self._clock is not None else None

    def proposed(self, pending: Sequence["Pending"]) -> None:
        """Remember what the rows ``0, 1, ...`` are about to verify."""
        self._pending[: len(pending)] = pending
        if self.costs is not None:
            slots, candidates = (max(found) for found in zip(*((p.slots, len(p.tokens)) for p in pending), strict=True))
            rows, kind = len(pending), DRAFTED if slots > 1 else COPIED if candidates else PLAIN
            self._round = kind, self.costs.of_draft(slots, rows) + self.costs.of_verify(rows * (candidates + 1))

    def learn(self, row: int, committed: Sequence[Sequence[int]]) -> None:
        """A round has ended: take in the tokens that stood, for rows ``row, row + 1, ...`` the anchor and the accepted ones."""
        if self._began is not None and self._round is not None and self._clock is not None:
            kind, expected = self._round
            self._paces[kind].add((self._clock() - self._began) / expected)
        self._began = self._round = None
        for i, tokens in enumerate(committed, row):
            pending, self._pending[i] = self._pending[i], None
            if pending is None:  # a prompt
                continue
            self._learn_nodes(pending, tokens[1:])
            self._learn_copy(pending, tokens[1:])
            if pending.slots > 1:
                least = TRIAL_WEIGHT if self._pause > FIRST_PAUSE else WEIGHT
                self._drafted[_kind(pending.match)].add(pending.slots, len(pending.tokens), len(tokens) - 1, least)

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
        self._began = self._round = None
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


class Drafted:
    """What rounds of one kind brought lately when they were drafted.

    Args:
        chance: that a path goes on from each depth, as expected at first: hopeful, so that drafting is tried.

    Attributes:
        verified: tokens of the verification, the anchor included.
    """

    def __init__(self, chance: float, block_size: int):
        self._reach = [chance**depth for depth in range(1, block_size)]  # how likely a path comes to each depth
        self._beyond = 0.0  # copied tokens that stood behind the block
        self.verified, self._outcomes = 8.0, FIRST_ROUNDS

    def gain(self, slots: int) -> float:
        """Expected accepted tokens with so many slots drafted."""
        return sum(self._reach[: slots - 1]) + self._beyond

    def add(self, slots: int, candidates: int, accepted: int, least: float) -> None:
        """Take in a round; ``least``: its weight in the averages once there are many."""
        self._outcomes += 1
        weight = max(least, 1 / self._outcomes)
        for depth in range(slots - 1):
            self._reach[depth] += weight * ((accepted > depth) - self._reach[depth])
        self._beyond += weight * (max(0, accepted - len(self._reach)) - self._beyond)
        self.verified += weight * (candidates + 1 - self.verified)


class Pace:
    """How much longer rounds of a kind take than their costs say."""

    def __init__(self) -> None:
        self._ratio, self._outcomes = 1.0, FIRST_ROUNDS

    def of(self, seconds: float) -> float:
        return seconds * self._ratio

    def add(self, ratio: float) -> None:
        """Take in a round. One that was held up says little of the next."""
        self._outcomes += 1
        bounded = min(max(ratio, 0.5 * self._ratio), 2.0 * self._ratio)
        self._ratio += max(WEIGHT, 1 / self._outcomes) * (bounded - self._ratio)


def _kind(match: int) -> int:
    return NO_COPY if not match else LONG_COPY if match >= LONG_MATCH else COPY


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
