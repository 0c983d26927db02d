"""Context: what a DFlash knows of its rows, the target's features as keys and values in every layer.

Features are handed over after each round and taken in when a draft needs them: where drafting rests they are hardly ever read.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.drafters.network import DFlash
from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.plain import PlainLayers
from blockdraft.engine.recorded import Recorder

UNREAD = 32  # tokens of every row that are taken in at a time, unless they are a prompt's
MOST_UNREAD = 256  # tokens of a row whose features may wait for a draft


class Context:
    """The injected context of every row, and the features that wait to be.

    Args:
        network: the drafter.
        plain: its layers as one call, where they have that path.
        recorder: of its passes.

    Attributes:
        cache: keys and values; a block's own come behind them while it is drafted.
    """

    cache: KVCache

    def __init__(self, network: DFlash, plain: PlainLayers | None, recorder: Recorder):
        self._network, self._plain, self._recorder = network, plain, recorder
        self._dtype, self._device = network.fc.weight.dtype, network.fc.weight.device

    def reset(self, rows: int, capacity: int) -> None:
        """Empty rows; buffers that passes were recorded over are kept if they fit."""
        capacity += UNREAD
        before: KVCache | None = getattr(self, "cache", None)
        if before is not None and before.recordings and before.rows == rows and before.capacity >= capacity:
            before.reuse()
        else:
            self.cache = KVCache(rows, capacity, self._dtype, self._device)
        self._unread: list[list[Tensor]] = [[] for _ in range(rows)]  # per row, features that no draft has needed yet
        self._waiting = [0] * rows  # tokens of them

    def observe(self, row: int, features: Tensor, counts: Sequence[int]) -> None:
        """Features ``[rows, most, taps * hidden]`` of committed tokens of the rows ``row, row + 1, ...``; those of a few wait."""
        rows = range(row, row + len(counts))
        if max(counts) > UNREAD and not any(self._waiting[i] for i in rows):
            self._inject(row, features, counts)
            return
        for i, found, count in zip(rows, features, counts, strict=True):
            self._unread[i].append(found[:count])
            self._waiting[i] += count
        if max(self._waiting) > MOST_UNREAD:
            self.read(self.cache.rows)

    def read(self, rows: int) -> None:
        """Take in the features of the first rows that wait, a few tokens of every row at a time."""
        none = self._network.fc.weight.new_empty(0, self._network.fc.in_features)
        waiting = [torch.cat(parts) if parts else none for parts in self._unread[:rows]]
        self._unread[:rows], self._waiting[:rows] = [[] for _ in range(rows)], [0] * rows
        for start in range(0, max(map(len, waiting)), UNREAD):
            pieces = [features[start : start + UNREAD].to(self._dtype) for features in waiting]
            padded = pieces[0][None] if rows == 1 else nn.utils.rnn.pad_sequence(pieces, batch_first=True)
            self._inject(0, padded, [len(piece) for piece in pieces])

    def _inject(self, row: int, features: Tensor, counts: Sequence[int]) -> None:
        """Context keys and values of the rows ``row, row + 1, ...``; features ``[rows, most, taps * hidden]``."""
        with torch.inference_mode():
            features = features[:, : max(counts)].to(self._dtype)
            few = self._recorder.on and row == 0 and max(counts) <= UNREAD
            if not (few and self._play_inject(features)):
                span = self.cache.open(row, self.cache.positions_behind(row, *features.shape[:2]))
                fused = self._network.fuse(features)
                if self._plain is not None:
                    self._plain.inject(fused, self._network.rotary(fused.float(), span.positions), self.cache, span)
                else:
                    for layer, (keys, values) in enumerate(self._network.inject(fused, span.positions)):
                        self.cache.update(keys, values, layer)
        self.cache.commit([range(count) for count in counts])

    def _play_inject(self, features: Tensor) -> bool:
        """The same as a recorded pass of the first rows, if there is one."""
        cache = self.cache
        padded = cache.open_padded(cache.positions_behind(0, *features.shape[:2]))
        if padded is None:
            return False
        assert padded.slots is not None
        rows, count = padded.slots.shape
        widened = F.pad(features, (0, 0, 0, count - features.shape[1], 0, rows - features.shape[0]))

        def run(features: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            with cache.aimed(Span(0, [0] * rows, count, positions, None, slots)):
                for layer, (keys, values) in enumerate(self._network.inject(self._network.fuse(features), positions)):
                    cache.update(keys, values, layer)
            return ()

        inputs = (widened, padded.positions, padded.slots)
        return self._recorder.play(cache, ("inject", rows, count), inputs, run) is not None

    @property
    def waiting_bytes(self) -> int:
        """Memory of the features that wait."""
        return sum(features.numel() * features.element_size() for parts in self._unread for features in parts)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row from position ``length`` on."""
        kept = self.cache.lengths[row]
        if self._waiting[row]:
            left = torch.cat(self._unread[row])[: max(0, length - kept)]
            self._unread[row], self._waiting[row] = [left], len(left)
        self.cache.truncate(row, min(kept, length))

    def move(self, source: int, target: int) -> None:
        """Let row ``target`` continue what row ``source`` was."""
        self.cache.move(source, target)
        self._unread[target], self._waiting[target] = list(self._unread[source]), self._waiting[source]
