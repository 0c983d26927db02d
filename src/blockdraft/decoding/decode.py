"""The decoding loop: propose, verify, accept, commit; or, without a drafter, one token per step.

All rows share one target pass per round, whatever each of them accepts. A finished row is replaced at once; the rows in use
stay the first ones of the caches.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Drafter
from blockdraft.engine.memory import placed
from blockdraft.errors import UsageError
from blockdraft.rules.accept import follow, reject
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import ACCEPT, best
from blockdraft.targets.target import Target

# Which decoder a drafter's caches belong to: the one that began last.
_at_work: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


@dataclass
class Round:
    """What one pass over all rows brought.

    Attributes:
        emitted: the requests that moved, with their new tokens.
        accepted: for each of them, how many of these tokens were drafted.
        draft_seconds, verify_seconds, seconds: in the drafter, in the target, and all in all. On a device that works on while
            Python goes ahead (CUDA, MPS) the first two are when calls came back, not when they were done.
        prefill: True for the pass over a prompt, which emits the first token.
    """

    emitted: list[tuple[Request, list[int]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    prefill: bool = False


class Decoder:
    """Rows in flight, with the caches of target and drafter.

    Args:
        target: verifies, or steps alone.
        drafter: proposes; None: plain autoregressive decoding.
        rows: most requests in flight.
        capacity: most positions of a request, prompt and output together.
        block_size: slots of a block; None: what the drafter was trained for.
    """

    def __init__(self, target: Target, drafter: Drafter | None, rows: int, capacity: int, block_size: int | None = None):
        self.target, self.drafter = target, drafter
        self.block_size = 1 if drafter is None else block_size or drafter.block_size
        self.taps = drafter.taps if drafter is not None else ()
        self.rows, self.capacity = rows, capacity
        room = 1 if drafter is None else drafter.room(self.block_size)
        self.cache = target.new_cache(rows, capacity + room)
        if drafter is not None:
            drafter.reset(rows, capacity + room)
            _at_work[_network_holder(drafter)] = self._token = object()
        self.active: list[Request] = []
        self._held: dict[int, Request] = {}  # what each row's caches were filled by

    def admit(self, request: Request, reuse: bool = False) -> Round:
        """Run a prompt in a free row and emit its first token.

        Args:
            request: not yet begun.
            reuse: keep the part of the row's caches that the prompt shares with the request before it.
        """
        began = time.perf_counter()
        self._refuse_shared_drafter()
        request.block_size = self.block_size
        if request.finish_reason is not None:
            return Round(prefill=True)
        row = len(self.active)
        kept = self._shared_prefix(row, request) if reuse else 0
        self._truncate(row, kept)
        self._held.pop(row, None)  # until the prompt is in, the row is nobody's
        logits = None
        for logits, features in self.target.prefill(self.cache, row, request.prompt[kept:], self.taps):
            if self.drafter is not None:
                count = self.cache.lengths[row] - kept
                tokens = placed([request.prompt[kept : kept + count]], self.target.device)
                self.drafter.observe(row, tokens, features, [count])
                kept += count
        assert logits is not None
        round = Round(prefill=True)
        self._seat(row, request, logits, round)
        request.prefill_seconds = self._clock(round, began, self.active[:-1])
        self.retire()
        return round

    def admit_all(self, requests: Sequence[Request]) -> Round:
        """Run several prompts in one pass over as many free rows, and emit each one's first token."""
        began = time.perf_counter()
        round = Round(prefill=True)
        requests = [request for request in requests if request.finish_reason is None]
        if not requests:
            return round
        self._refuse_shared_drafter()
        first, waiting = len(self.active), list(self.active)
        for row in range(first, first + len(requests)):
            self._truncate(row, 0)
            self._held.pop(row, None)
        logits, features = self.target.prefill_rows(self.cache, first, [request.prompt for request in requests], self.taps)
        if self.drafter is not None:
            counts = [len(request.prompt) for request in requests]
            padded = [[*request.prompt, *[0] * (max(counts) - count)] for request, count in zip(requests, counts, strict=True)]
            self.drafter.observe(first, placed(padded, self.target.device), features, counts)
        for row, request in enumerate(requests):
            request.block_size = self.block_size
            self._seat(first + row, request, logits[row], round)
        seconds = self._clock(round, began, waiting)
        for request in requests:
            request.prefill_seconds = seconds
        self.retire()
        return round

    def _seat(self, row: int, request: Request, logits: Tensor, round: Round) -> None:
        """Let a request whose prompt is in ``row`` take part, and emit its first token, from ``logits`` ``[vocabulary]``."""
        self.active.append(request)
        self._held[row] = request
        token = request.sampler.choose(logits, request.prompt)
        request.extend([token])
        round.emitted.append((request, [token]))
        round.accepted.append(0)

    def round(self) -> Round:
        """One pass over all rows in flight."""
        began = time.perf_counter()
        self._refuse_shared_drafter()
        round = self._plain_round() if self.drafter is None else self._draft_round(self.drafter)
        self._clock(round, began, self.active)
        self.retire()
        return round

    def _refuse_shared_drafter(self) -> None:
        if self.drafter is not None and _at_work.get(_network_holder(self.drafter)) is not self._token:
            raise UsageError(
                "the drafter has begun to work for another decoding, and its caches with it; finish one before the next, or load "
                "a drafter for each"
            )

    def abandon(self) -> None:
        """Give up all requests in flight. An interrupt may have left target and drafter apart, so nothing is reused."""
        self.active.clear()
        self._held.clear()

    @staticmethod
    def _clock(round: Round, began: float, waiting: list[Request]) -> float:
        """Charge the pass to all requests that waited for it; what the caller does between passes is not decoding."""
        round.seconds = time.perf_counter() - began
        for request in waiting:
            request.decode_seconds += round.seconds
        return round.seconds

    def _plain_round(self) -> Round:
        logits = self.target.step(self.cache, self._anchors())
        tokens = best(logits).tolist()
        for i, request in enumerate(self.active):
            if not request.sampler.plain_greedy:
                tokens[i] = request.sampler.choose(logits[i], request.ids)
        for request, token in zip(self.active, tokens, strict=True):
            request.extend([token])
        return Round([(request, [token]) for request, token in zip(self.active, tokens, strict=True)], [0] * len(tokens))

    def _draft_round(self, drafter: Drafter) -> Round:
        round = Round()
        anchors = self._anchors()
        widths = [min(self.block_size, request.remaining + 1) for request in self.active]
        drawing = any(request.params.acceptance == "rejection" for request in self.active)
        clock = time.perf_counter()
        proposal = drafter.propose(anchors, widths, self._draw if drawing else None)
        round.draft_seconds = time.perf_counter() - clock
        clock = time.perf_counter()
        logits, features = self.target.verify(self.cache, anchors, proposal, self.taps)
        round.verify_seconds = time.perf_counter() - clock
        candidates = proposal.tokens.tolist()
        paths, bonuses = self._accept(proposal, candidates, logits)
        self.target.commit(self.cache, paths)
        self._book(round, proposal.widths, candidates, paths, bonuses)
        clock = time.perf_counter()
        tokens, features, counts = _along(paths, torch.cat([anchors[:, None], proposal.tokens], dim=1), features)
        drafter.observe(0, tokens, features, counts)
        round.draft_seconds += time.perf_counter() - clock
        return round

    def _accept(self, proposal: Proposal, candidates: list[list[int]], logits: Tensor) -> tuple[list[list[int]], list[int]]:
        """Each row's path of nodes, and its bonus token."""
        greedy = all(request.sampler.plain_greedy for request in self.active)
        choices = best(logits).tolist() if greedy else None
        parents = proposal.parents.tolist() if proposal.parents is not None else None
        paths, bonuses = [], []
        for i, request in enumerate(self.active):
            tokens = candidates[i][: proposal.widths[i] - 1]
            if request.params.acceptance == "rejection":
                laws = proposal.probabilities
                assert parents is None and (laws is not None or not tokens), "rejection needs a chain whose tokens were drawn"
                path, bonus = self._reject(request, tokens, laws[i] if laws is not None else logits[i, :0], logits[i])
            elif choices is not None:
                row = choices[i]
                path, bonus = follow(tokens, parents and parents[i], lambda node, _, row=row: row[node])  # type: ignore[misc]
            else:
                path, bonus = self._follow(request, tokens, parents and parents[i], logits[i])
            paths.append(path)
            bonuses.append(bonus)
        return paths, bonuses

    @staticmethod
    def _follow(request: Request, tokens: list[int], parents: list[int] | None, logits: Tensor) -> tuple[list[int], int]:
        ids = request.ids
        return follow(tokens, parents, lambda node, emitted: request.sampler.choose(logits[node], ids + emitted))

    @staticmethod
    def _reject(request: Request, tokens: list[int], laws: Tensor, logits: Tensor) -> tuple[list[int], int]:
        ids, sampler = request.ids, request.sampler
        return reject(
            tokens,
            laws,
            lambda node, emitted: sampler.law(logits[node], ids + emitted),
            lambda i: sampler.uniform(len(ids) + i, ACCEPT),
            lambda i: sampler.uniform(len(ids) + i),
        )

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draft tokens and laws; rows under the match rule get their most probable tokens."""
        tokens, laws = best(logits), torch.zeros_like(logits, dtype=torch.float32)
        for i, request in enumerate(self.active):
            if request.params.acceptance == "rejection":
                tokens[i], laws[i] = request.sampler.draw_draft(logits[i], len(request.prompt) + len(request.output))
        return tokens, laws

    def _book(
        self, round: Round, widths: Sequence[int], candidates: list[list[int]], paths: list[list[int]], bonuses: list[int]
    ) -> None:
        """Emit each row's accepted candidates and bonus, as far as the request goes."""
        for i, request in enumerate(self.active):
            tokens = [candidates[i][node - 1] for node in paths[i][1:]]
            emitted = request.extend([*tokens, bonuses[i]])
            accepted = min(emitted, len(tokens))
            request.count_round(widths[i] - 1, range(1, accepted + 1))
            round.emitted.append((request, [*tokens, bonuses[i]][:emitted]))
            round.accepted.append(accepted)

    def _anchors(self) -> Tensor:
        return placed([request.output[-1] for request in self.active], self.target.device)

    def retire(self) -> None:
        """Drop finished requests; the last row takes the place of each."""
        for row in reversed(range(len(self.active))):
            if self.active[row].finish_reason is None:
                continue
            last = len(self.active) - 1
            if row != last:
                self.cache.move(last, row)
                if self.drafter is not None:
                    self.drafter.move(last, row)
                self.active[row] = self._held[row] = self.active[last]
            self.active.pop()

    def _shared_prefix(self, row: int, request: Request) -> int:
        """How many of the prompt's tokens the row's caches hold already; the last one is always run again, for its logits."""
        before = self._held.get(row)
        if before is None:
            return 0
        shared = 0
        for old, new in zip(before.ids[: self.cache.lengths[row]], request.prompt[:-1], strict=False):
            if old != new:
                break
            shared += 1
        return shared

    def _truncate(self, row: int, length: int) -> None:
        self.cache.truncate(row, length)
        if self.drafter is not None:
            self.drafter.truncate(row, length)


def _network_holder(drafter: Drafter) -> Any:
    """What keeps the caches: a tree drafter has them in the drafter that it grows trees from."""
    return getattr(drafter, "drafter", drafter)


def _along(paths: list[list[int]], tokens: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None, list[int]]:
    """Tokens and features of each row's path, padded to the longest, and the lengths."""
    counts = [len(path) for path in paths]
    most = max(counts)
    if all(path == list(range(len(path))) for path in paths):
        return tokens[:, :most], features[:, :most] if features is not None else None, counts
    nodes = placed([path + [0] * (most - len(path)) for path in paths], tokens.device)
    if features is not None:
        features = features.gather(1, nodes[:, :, None].expand(-1, -1, features.shape[-1]))
    return tokens.gather(1, nodes), features, counts


def decode(
    target: Target,
    drafter: Drafter | None,
    requests: Iterable[Request],
    batch_size: int = 1,
    block_size: int | None = None,
) -> Iterator[Round]:
    """Decode requests to their ends, ``batch_size`` at a time; yields every round as it happens."""
    waiting = list(requests)
    capacity = max((len(request.prompt) + request.limit for request in waiting), default=1)
    decoder = Decoder(target, drafter, max(1, min(batch_size, len(waiting))), capacity, block_size)
    waiting.reverse()
    try:
        while waiting or decoder.active:
            if waiting and len(decoder.active) < decoder.rows:
                yield decoder.admit(waiting.pop())
            else:
                yield decoder.round()
    finally:
        target.give_back(decoder.cache)
