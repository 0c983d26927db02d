"""Classic speculative decoding: a smaller language model of the same tokenizer drafts, one token after the other
(arXiv 2211.17192, arXiv 2302.01318)."""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.drafters.base import Draw
from blockdraft.engine.cache import KVCache
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import best
from blockdraft.targets.target import Target

BLOCK_SIZE = 5  # the anchor and four drafted tokens
CHUNK = 64  # observed tokens that are taken in before a draft: more are a prompt


class ModelDrafter:
    """A language model at work as a drafter. A row that outgrows the model's own context is forgotten, and goes on without drafts.

    Args:
        model: the smaller model.
        vocabulary: rows of the target's head: what the two heads differ by is padding.
        name: for results.
    """

    method = "draft-model"
    taps: tuple[int, ...] = ()
    cache: KVCache

    def __init__(self, model: Target, vocabulary: int, name: str = ""):
        self.model, self.vocabulary = model, vocabulary
        self.name, self.block_size = name or model.name, BLOCK_SIZE
        self._rows = 0
        self._known = model.embedding.num_embeddings - 1  # padding of the target's vocabulary may lie beyond

    def room(self, block_size: int) -> int:
        return block_size

    def reset(self, rows: int, capacity: int) -> None:
        if self._rows:
            self.model.give_back(self.cache)
        self._rows = rows
        self.cache = self.model.new_cache(rows, capacity + CHUNK + 1)
        self._unread: list[list[int]] = [[] for _ in range(rows)]  # observed, and not in the cache
        self._outgrown: set[int] = set()  # rows that it has forgotten

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        for i, count in enumerate(counts):
            unread = self._unread[row + i]
            if row + i in self._outgrown:
                continue
            if self.cache.lengths[row + i] + len(unread) + count + BLOCK_SIZE > self.model.context:
                self._outgrow(row + i)
                continue
            unread += tokens[i, :count].clamp(max=self._known).tolist()
            if len(unread) > CHUNK:
                for _ in self.model.prefill(self.cache, row + i, unread):
                    pass
                unread.clear()

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        rows, steps = len(widths), max(widths) - 1
        room = self.model.context - max(widths)
        for row in range(rows):
            if self.cache.lengths[row] + len(self._unread[row]) > room:
                self._outgrow(row)
        widths = [1 if row in self._outgrown else width for row, width in enumerate(widths)]
        if max(widths) == 1:
            return Proposal(anchors.new_empty(rows, 0), widths)
        lengths = list(self.cache.lengths[:rows])
        logits = [self._read(anchors)]
        tokens, laws = anchors.new_empty(rows, 0), None
        for step in range(steps):
            if draw is None:
                tokens = torch.cat([tokens, best(logits[-1])[:, None]], dim=1)
            else:  # noise is keyed by position: earlier tokens are drawn again, the same
                tokens, laws = draw(torch.stack(logits, dim=1))
            if step + 1 < steps:
                logits.append(self._fitted(self.model.step(self.cache, tokens[:, step].clamp(max=self._known))))
        for row, length in enumerate(lengths):  # the anchor and what was drafted are not observed yet
            self.cache.truncate(row, length + len(self._unread[row]))
            self._unread[row].clear()
        return Proposal(tokens, widths, probabilities=laws)

    def _outgrow(self, row: int) -> None:
        """Forget a row: from now on its anchors are read at the beginning of its empty cache, and what follows is not used."""
        warnings.warn(f"{self.name} reads {self.model.context} tokens: longer conversations go on without drafts")
        self.cache.truncate(row, 0)
        self._unread[row].clear()
        self._outgrown.add(row)

    def _read(self, anchors: Tensor) -> Tensor:
        """Take in what was observed and the anchors; the logits ``[rows, vocabulary]`` behind them."""
        known = anchors.clamp(max=self._known).tolist()
        ids = [[*unread, anchor] for unread, anchor in zip(self._unread, known, strict=False)]
        counts = [len(row) for row in ids]
        padded = torch.tensor([row + [0] * (max(counts) - len(row)) for row in ids], device=anchors.device)
        found, _ = self.model.verify(self.cache, padded[:, 0], Proposal(padded[:, 1:], counts))
        self.model.commit(self.cache, [range(count) for count in counts])
        last = torch.tensor(counts, device=anchors.device) - 1
        return self._fitted(found[torch.arange(len(counts), device=anchors.device), last])

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: rows that one head has and the other has not are padding."""
        missing = self.vocabulary - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., : self.vocabulary]

    def bytes(self) -> int:
        weights = sum(p.numel() * p.element_size() for p in self.model.model.parameters())
        return weights + self.model.packed_bytes + self.cache.bytes()

    def truncate(self, row: int, length: int) -> None:
        kept = self.cache.lengths[row]
        if length <= kept:
            self.cache.truncate(row, length)
        if length == 0:
            self._outgrown.discard(row)
        del self._unread[row][max(0, length - kept) :]

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self._unread[target] = list(self._unread[source])
        self._outgrown.discard(target)
        if source in self._outgrown:
            self._outgrown.add(target)


def refuse_other_tokenizer(model: Target, target: Target) -> None:
    """Raise UsageError if two models do not read the same ids.

    Models without a tokenizer are compared by the sizes of their vocabularies alone.
    """
    ours, theirs = model.tokenizer, target.tokenizer
    same = model.vocab_size == target.vocab_size if None in (ours, theirs) else ours.get_vocab() == theirs.get_vocab()  # type: ignore[union-attr]
    if not same:
        raise UsageError(
            f"drafter {model.name} has another tokenizer than target {target.name}: a smaller model can draft only for one whose "
            "token ids mean the same"
        )
