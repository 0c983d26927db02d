"""Scoring: a reading on the target's own continuations, against the configured one, conversation by conversation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.doctor.readings import Reading
from blockdraft.drafters.network import DFlash
from blockdraft.drafters.shortlist import Shortlist
from blockdraft.targets.target import Target
from blockdraft.training.blocks import Blocks, block_embeddings

SURE = 3.3  # standard errors of many conversations: a dozen readings are tried, and a healthy drafter must pass them all
WORTH = 0.01  # a smaller gain, as a share of the acceptance length, is not worth a word


@dataclass
class Score:
    """A reading on the probe, against the configured one.

    Attributes:
        name, fault: of the reading.
        anchors: that it was scored on.
        acceptance_length: mean over these of accepted tokens plus one, teacher-forced.
        difference, low, high: to the configured reading, paired, with its interval.
    """

    name: str
    fault: str
    anchors: int
    acceptance_length: float
    difference: float
    low: float
    high: float

    def better(self, base: float) -> bool:
        """Whether it is better beyond doubt, and worth a word."""
        return self.low > 0 and self.difference > WORTH * base


class Probe:
    """Runs readings over texts: all anchors of an answer in one forward pass, as in training."""

    def __init__(self, network: DFlash, target: Target, words: Tensor | None):
        self.target, self.state = target, network.state_dict()
        head = target.head
        self.words = Shortlist.of(words, head) if words is not None and isinstance(head, nn.Linear) else None
        self._features: dict[int, dict[int, Tensor]] = {}

    def accepted(self, reading: Reading, texts: Sequence[tuple[list[int], int]]) -> list[Tensor]:
        """For each text, how many tokens a round at each of its anchors would emit, float64 ``[anchors]``."""
        network = DFlash(reading.config)
        network.load_state_dict(self.state)
        blocks = Blocks(network.to(self.target.device, self.target.dtype)).eval()
        return [self._of(blocks, reading, ids, start) for ids, start in texts]

    def _of(self, blocks: Blocks, reading: Reading, ids: list[int], start: int) -> Tensor:
        target, width = self.target, reading.config.block_size
        row = torch.tensor([ids], device=target.device)
        anchors = torch.arange(start, len(ids) - 1, device=target.device)[None]
        positions = torch.arange(len(ids), device=target.device)[None]
        with torch.inference_mode():
            features = self._read(row, reading)
            embeddings = block_embeddings(blocks.network, target.embed, row, anchors, width).to(target.dtype)
            hidden = blocks(embeddings, features, anchors, positions, torch.zeros_like(positions), width)[0]
            hidden = hidden[:, :-1] if reading.shifted else hidden[:, 1:]
            best = (
                target.head(hidden).argmax(dim=-1) if self.words is None else self.words.ids[self.words.logits(hidden).argmax(-1)]
            )
        index = anchors[0, :, None] + torch.arange(1, width, device=target.device)
        right = (best == row[0][index.clamp(max=len(ids) - 1)]) & (index < len(ids))
        return 1 + right.long().cumprod(dim=1).sum(dim=1).double().cpu()

    def _read(self, row: Tensor, reading: Reading) -> Tensor:
        """Features of a text, each layer computed once for all readings."""
        key = hash(tuple(row[0].tolist()))
        known = self._features.setdefault(key, {})
        wanted = [tap for tap in reading.config.taps if tap not in known]
        if wanted:
            found, last = self.target.read(row, wanted)
            known |= dict(zip(wanted, found.split(self.target.hidden_size, dim=-1), strict=True)) | {-1: last}
        pieces = [known[tap] for tap in reading.config.taps]
        if reading.normed:
            pieces[-1] = known[-1]
        return torch.cat(pieces, dim=-1)


def mean(rows: Sequence[Tensor]) -> float:
    return float(torch.cat(list(rows)).mean()) if rows else 0.0


def scored(probe: Probe, reading: Reading, texts: Sequence[tuple[list[int], int]], plain: Sequence[Tensor]) -> Score:
    """On all texts, or on as many as it takes to see that it is worse."""
    other: list[Tensor] = []
    score = None
    for start in range(0, len(texts), 8):
        other += probe.accepted(reading, texts[start : start + 8])
        score = _compared(reading, other, plain[: len(other)])
        if score.high < 0:
            break
    assert score is not None
    return score


def _compared(reading: Reading, other: Sequence[Tensor], plain: Sequence[Tensor]) -> Score:
    """Paired by anchor; anchors of one conversation hang together, so the error is that of conversations."""
    sums = torch.stack([(a - b).sum() for a, b in zip(other, plain, strict=True)])
    counts = torch.tensor([len(row) for row in plain], dtype=torch.float64)
    difference = float(sums.sum() / counts.sum())
    spread = sums - difference * counts
    few = len(counts) / max(1, len(counts) - 1)
    error = float((few * spread.square().sum()).sqrt() / counts.sum())
    margin = _quantile(len(counts) - 1) * error if len(counts) > 1 else math.inf
    return Score(reading.name, reading.fault, int(counts.sum()), mean(other), difference, difference - margin, difference + margin)


def _quantile(freedom: int) -> float:
    """Of Student's t, where that of the normal law is SURE (Cornish-Fisher)."""
    z = SURE
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
