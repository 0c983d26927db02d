"""What a drafter is worth: the training estimate on held-out documents, and the real acceptance length from real decoding."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3, Eagle3Drafter
from blockdraft.drafters.network import DFlash
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.batches import Batches, Document
from blockdraft.training.learner import Learner
from blockdraft.training.metrics import Sums

ESTIMATE_ANCHORS = 16  # blocks of a held-out row: enough for two digits


@dataclass(frozen=True)
class Real:
    """Real decoding of some prompts, greedy, chain.

    Attributes:
        rounds, emitted: of all prompts; the prompt's pass and its token are not counted.
        first_slot: share of rounds that drafted in which the first draft stood.
        seconds: of decoding.
    """

    rounds: int
    emitted: int
    first_slot: float | None
    seconds: float

    @property
    def tau(self) -> float | None:
        """Tokens emitted per round."""
        return self.emitted / self.rounds if self.rounds else None


def as_drafter(network: DFlash | Eagle3, state: dict[str, Tensor], target: Target) -> DFlashDrafter | Eagle3Drafter:
    """A drafter in the target's dtype and on its device, with these weights: what decoding will run, not what training runs."""
    copy = fresh(network, state).to(target.device, target.dtype).requires_grad_(False)
    if isinstance(copy, Eagle3):
        return Eagle3Drafter(copy, target.embed, target.vocab_size)
    return DFlashDrafter(copy, target.embed, target.head)


def fresh(network: DFlash | Eagle3, state: dict[str, Tensor]) -> DFlash | Eagle3:
    """Another network of the same sizes, float32 on the CPU, with these weights."""
    copy = Eagle3(network.config) if isinstance(network, Eagle3) else DFlash(network.config)
    copy.load_state_dict(state)
    return copy


def decode_held_out(target: Target, drafter: Drafter | None, documents: Sequence[Document], tokens: int, batch: int = 8) -> Real:
    """Answer the prompts of documents anew, with the drafter or (None) without."""
    params = SamplingParams(max_new_tokens=tokens)
    requests = [Request(d.ids[: d.start], params, target, detokenize=False) for d in documents]
    began = time.perf_counter()
    for _ in decode(target, drafter, requests, batch):
        pass
    seconds = time.perf_counter() - began
    rounds = sum(request.rounds for request in requests)
    emitted = sum(len(request.output) - 1 for request in requests if request.output)
    first = _first_slot(requests)
    return Real(rounds, emitted, first, seconds)


def _first_slot(requests: Sequence[Request]) -> float | None:
    drafted = sum(request.rounds for request in requests)
    stood = sum(request.accepted_at[0] for request in requests if request.accepted_at)
    return stood / drafted if drafted else None


def by_source(documents: Sequence[Document], most: int) -> dict[str, list[Document]]:
    """Up to ``most`` documents of each source."""
    found: dict[str, list[Document]] = {}
    for document in documents:
        mine = found.setdefault(document.source, [])
        if len(mine) < most:
            mine.append(document)
    return found


def spread(documents: Sequence[Document], count: int) -> list[Document]:
    """``count`` documents, the sources in turn."""
    ranked = [(place, document) for mine in by_source(documents, count).values() for place, document in enumerate(mine)]
    return [document for _, document in sorted(ranked, key=lambda entry: entry[0])[:count]]


def estimate(learner: Learner, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Figures of held-out blocks, always the same ones, over the whole vocabulary."""
    blocks = learner.module(fresh(learner.run.network, weights)).eval()
    c = learner.config
    rows = c.micro_rows or c.rows
    held_out = Batches(learner.run.documents.held_out, c.sequence_length, min(c.anchors, ESTIMATE_ANCHORS), rows, c.seed)
    total: Sums | None = None
    with torch.no_grad():
        for step in range(held_out.steps_per_epoch):
            batch = held_out.batch(held_out.step(step), 0).to(learner.device)
            _, sums = learner.loss(blocks, batch, learner.held_out_features, 0)
            total = sums if total is None else total + sums
    assert total is not None
    return total.figures()
