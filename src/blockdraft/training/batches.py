"""Documents packed into rows of fixed length, and the anchors drawn in them.

Everything random here is a pure function of (seed, epoch, row): a run that is resumed, or split over processes, sees the same
batches in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.rules.sampling import counter_uniform
from blockdraft.training.data.corpus import TEXT

OPEN_ROWS = 32  # rows that wait for a document that fits, while packing


@dataclass(frozen=True)
class Document:
    """One conversation: a prompt and the target's answer to it.

    Attributes:
        key, source: from the corpus.
        ids: prompt and answer.
        start: where the answer begins.
    """

    key: str
    source: str
    ids: list[int]
    start: int

    @property
    def anchors(self) -> range:
        """Positions that can be an anchor: answer tokens with at least one token behind them."""
        return range(self.start, len(self.ids) - 1)

    @property
    def foreign(self) -> bool:
        """Whether the target did not write it: then its probabilities are the labels."""
        return self.source == TEXT


@dataclass
class Batch:
    """Packed rows and their blocks.

    Attributes:
        ids: ``[rows, length]`` int64.
        positions: ``[rows, length]`` int64, counted from each document's first token.
        documents: ``[rows, length]`` int64, number of the document in its row; -1 is padding.
        anchors: ``[rows, anchors]`` int64, ascending indices into the row.
        real: ``[rows, anchors]`` bool; False fills up the shape and carries no loss.
        foreign: ``[rows, anchors]`` bool, blocks in documents that the target did not write.
        members: for each row its documents, by index, in order.
        keys: for each row its epoch and number (-1: an empty row): what its noise depends on.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    anchors: Tensor
    real: Tensor
    foreign: Tensor
    members: list[list[int]]
    keys: list[tuple[int, int]]

    def to(self, device: torch.device) -> "Batch":
        ids, positions, documents, anchors, real, foreign = (
            x.to(device) for x in (self.ids, self.positions, self.documents, self.anchors, self.real, self.foreign)
        )
        return Batch(ids, positions, documents, anchors, real, foreign, self.members, self.keys)

    def narrowed(self) -> "Batch":
        """Without the anchors that only fill up the shape."""
        most = max(1, int(self.real.sum(dim=1).max()))
        return replace(self, anchors=self.anchors[:, :most], real=self.real[:, :most], foreign=self.foreign[:, :most])

    def labels(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[rows, anchors, block - 1]`` behind each anchor, and which of them are inside its document."""
        length = self.ids.shape[1]
        index = self.anchors[..., None] + torch.arange(1, block_size, device=self.ids.device)
        inside = index < length
        flat = index.clamp(max=length - 1).flatten(1)
        shape = index.shape
        labels = self.ids.gather(1, flat).view(shape)
        same = self.documents.gather(1, flat).view(shape) == self.documents.gather(1, self.anchors)[..., None]
        return labels, inside & same & self.real[..., None]


def pack(documents: Sequence[Document], length: int, most: int, seed: int) -> list[list[int]]:
    """Rows of document indices, each of at most ``length`` tokens and ``most`` documents: first fit, in random order.

    Raises:
        UsageError: a document is longer than a row.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    free: list[int] = []  # room in the last OPEN_ROWS rows
    for index in torch.randperm(len(documents), generator=generator).tolist():
        size = len(documents[index].ids)
        if size > length:
            raise UsageError(f"conversation {documents[index].key} has {size} tokens, a row has sequence_length {length}")
        first = len(rows) - len(free)
        for offset, room in enumerate(free):
            if size <= room and len(rows[first + offset]) < most:
                rows[first + offset].append(index)
                free[offset] -= size
                break
        else:
            rows.append([index])
            free.append(length - size)
            if len(free) > OPEN_ROWS:
                free.pop(0)
    return rows


class Batches:
    """The order of a run: which rows make step s, and which anchors they have.

    Args:
        documents: of the corpus.
        length: tokens of a row.
        anchors: blocks of a row.
        rows: rows of a step; the last step of an epoch is filled up with empty rows.
        seed: of packing, order and anchors.
    """

    def __init__(self, documents: Sequence[Document], length: int, anchors: int, rows: int, seed: int):
        self.documents, self.length, self.anchors, self.rows, self.seed = documents, length, anchors, rows, seed
        self.packed = pack(documents, length, anchors, seed)
        self.steps_per_epoch = -(-len(self.packed) // rows)
        self._epoch, self._order = -1, [0]

    def step(self, step: int, part: int = 0, parts: int = 1) -> list[int | None]:
        """Row numbers of ``step`` (from 0) that fall to one of ``parts`` processes; None is an empty row."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, -1))
            self._epoch, self._order = epoch, torch.randperm(len(self.packed), generator=generator).tolist()
        rows: list[int | None] = list(self._order[index * self.rows : (index + 1) * self.rows])
        rows += [None] * (self.rows - len(rows))
        return rows[part::parts]

    def batch(self, rows: Sequence[int | None], epoch: int) -> Batch:
        """The rows as tensors, with the anchors of this epoch."""
        shape = (len(rows), self.length)
        ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        documents = torch.full(shape, -1)
        anchors = torch.zeros(len(rows), self.anchors, dtype=torch.long)
        real = torch.zeros(len(rows), self.anchors, dtype=torch.bool)
        foreign = torch.zeros_like(real)
        members: list[list[int]] = []
        for i, row in enumerate(rows):
            members.append([] if row is None else self.packed[row])
            start, eligible = 0, []
            for number, index in enumerate(members[-1]):
                document = self.documents[index]
                end = start + len(document.ids)
                ids[i, start:end] = torch.tensor(document.ids)
                positions[i, start:end] = torch.arange(end - start)
                documents[i, start:end] = number
                eligible.append(torch.arange(document.anchors.start, document.anchors.stop) + start)
                start = end
            if row is not None:
                drawn = draw_anchors(eligible, self.anchors, seed_of(self.seed, epoch, row))
                anchors[i, : len(drawn)] = drawn
                real[i, : len(drawn)] = True
                theirs = torch.tensor([self.documents[index].foreign for index in members[-1]])
                foreign[i, : len(drawn)] = theirs[documents[i, drawn]]
        keys = [(epoch, -1 if row is None else row) for row in rows]
        return Batch(ids, positions, documents, anchors, real, foreign, members, keys)


def draw_anchors(eligible: Sequence[Tensor], count: int, seed: int) -> Tensor:
    """``count`` of the eligible positions (or all, if they are fewer), ascending; every document gets one at least.

    Args:
        eligible: for each document its positions, int64; at most ``count`` documents.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = [places[torch.randperm(len(places), generator=generator)] for places in eligible if len(places)]
    if not shuffled:
        return torch.zeros(0, dtype=torch.long)
    firsts = torch.cat([places[:1] for places in shuffled])
    rest = torch.cat([places[1:] for places in shuffled])
    rest = rest[torch.randperm(len(rest), generator=generator)[: count - len(firsts)]]
    return torch.cat([firsts, rest]).sort().values


def seed_of(*key: int) -> int:
    """A seed of its own for every key of integers."""
    return int(counter_uniform(*key) * 2**53)
