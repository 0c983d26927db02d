"""KVCache: fixed key/value buffers, one length per row, rolled back by forgetting instead of by copying.

A forward pass writes the keys and values of its tokens *behind* each row's length; only ``commit`` moves the length. What
was rejected is simply overwritten by the next round. The same class serves the target (through transformers' cache
interface) and the drafter (directly).
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from blockdraft.engine.kernels import Slots
from blockdraft.engine.memory import placed
from blockdraft.engine.recorded import Recorder, Recording

SPARE = 128  # slots behind what was asked for, on CUDA: passes are padded to one of a handful of shapes
SHORTEST = 512  # keys of a padded pass


@dataclass(slots=True)
class Span:
    """Where one forward pass writes: ``count`` slots behind the start of each of the rows ``first .. first + rows - 1``.

    Attributes:
        first: the first row.
        starts: for each row, the slot of its first new token.
        count: new tokens per row (rows with fewer are padded).
        positions: ``[rows, count]`` int64, the position of each new token; in a tree siblings share one.
        visible: ``[rows, count, count]`` bool, which new token sees which, or None: a plain chain.
        slots: ``[rows, count]`` int64 for rows that start at different slots, else None.
        extent: slots that are attended over, where they are more than the pass needs (a padded pass), else 0.
        mask: additive ``[rows, 1, count, extent]``, ready made, for a padded pass.
    """

    first: int
    starts: list[int]
    count: int
    positions: Tensor
    visible: Tensor | None = None
    slots: Tensor | None = None
    extent: int = 0
    mask: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.starts))

    @property
    def end(self) -> int:
        return self.extent or max(self.starts) + self.count

    @property
    def lone(self) -> bool:
        """True if every new token sees all keys up to the end under a plain causal rule: nothing needs a mask."""
        return self.count == 1 and self.slots is None


class KVCache(Cache):
    """Buffers ``[rows, kv heads, capacity, head size]`` per layer, allocated once, when a layer first writes.

    Args:
        rows: sequences that can be held at once.
        capacity: slots per row, including the room that the widest block needs behind the last committed token.
        dtype: of the model. Keys and values are stored and attended over in it; on CPUs in float32, where attention over few
            queries is several times faster than in bfloat16.
        device: of the buffers.
    """

    def __init__(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        self.rows, self.device = rows, device
        self.capacity = capacity if device.type != "cuda" else -(-(capacity + SPARE) // 256) * 256
        self.dtype = torch.float32 if device.type == "cpu" else dtype
        self.lengths = [0] * rows
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.span: Span | None = None
        self._slots: Slots | None = None  # of all buffers, once a path was gathered
        self.causal_only = True  # until a model asks for a mask of another rule
        self.recordings: dict[Hashable, Recording] = {}  # of passes over these buffers (``recorded.py``)

    # ---- one forward pass

    def open(self, first: int, positions: Tensor, visible: Tensor | None = None) -> Span:
        """Aim the next forward pass at the slots behind the rows' lengths.

        Args:
            first: the first of the rows.
            positions: ``[rows, count]`` int64 positions of the new tokens.
            visible: ``[rows, count, count]`` bool, for trees and for rows of unequal width.

        Raises:
            IndexError: the tokens do not fit behind a row's length.
        """
        rows, count = positions.shape
        starts = self.lengths[first : first + rows]
        if max(starts) + count > self.capacity:
            raise IndexError(f"{count} tokens behind slot {max(starts)} do not fit into {self.capacity} slots")
        slots = None
        if len(set(starts)) > 1:
            slots = placed(starts, self.device)[:, None] + torch.arange(count, device=self.device)
        self.span = Span(first, starts, count, positions, visible, slots)
        return self.span

    def open_padded(self, positions: Tensor, visible: Tensor | None = None) -> Span | None:
        """As ``open`` for the first rows; and the same pass with rows, tokens and keys padded to one of a handful of numbers.

        Padding sees itself alone of what is new, and nobody sees it. What it writes lies behind the rows' lengths.

        Returns:
            The padded span; None where it does not fit: then only ``open`` has been done.
        """
        span = self.open(0, positions, visible)
        rows, count = min(_power(len(span.starts)), self.rows), _power(span.count)
        count = count if count <= 16 else -(-span.count // 16) * 16
        starts = self.lengths[:rows]
        if max(starts) + count > self.capacity:
            return None
        if (rows, count) != positions.shape:
            chain = torch.ones(span.count, span.count, dtype=torch.bool, device=self.device).tril()
            among = chain if visible is None else visible
            visible = torch.eye(count, dtype=torch.bool, device=self.device).repeat(rows, 1, 1)
            visible[: len(span.starts), : span.count, : span.count] = among
            positions = F.pad(positions, (0, count - span.count, 0, rows - len(span.starts)))
        slots = placed(starts, self.device)[:, None] + torch.arange(count, device=self.device)
        extent = min(self.capacity, max(SHORTEST, _power(max(starts) + count)))
        return Span(0, starts, count, positions, visible, slots, extent)

    @contextmanager
    def aimed(self, span: Span) -> Iterator[None]:
        """Let a pass write at another span than the one that will be committed."""
        opened, self.span = self.span, span
        try:
            yield
        finally:
            self.span = opened

    def reuse(self) -> None:
        """Begin again with empty rows; buffers, and what was recorded over them, stay."""
        self.lengths, self.span = [0] * self.rows, None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[rows, kv heads, count, head size]`` where ``open`` aimed; return views of all slots up to the end."""
        span = self.span
        assert span is not None, "open() comes before a forward pass"
        keys = self._buffer(self.keys, layer_idx, key_states.shape[1], key_states.shape[-1])
        values = self._buffer(self.values, layer_idx, value_states.shape[1], value_states.shape[-1])
        for buffer, new in ((keys, key_states), (values, value_states)):
            rows = buffer[span.rows]
            if span.slots is None:
                rows[:, :, span.starts[0] : span.starts[0] + span.count] = new
            else:
                row = torch.arange(rows.shape[0], device=self.device)[:, None]
                rows[row, :, span.slots] = new.transpose(1, 2).to(self.dtype)
        return keys[span.rows, :, : span.end], values[span.rows, :, : span.end]

    def buffers(self, layer: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values ``[rows, kv heads, capacity, head size]``, for who writes behind the lengths by itself."""
        return self._buffer(self.keys, layer, heads, size), self._buffer(self.values, layer, heads, size)

    def _buffer(self, buffers: dict[int, Tensor], layer: int, heads: int, size: int) -> Tensor:
        if layer not in buffers:
            # Zeros, not garbage: a masked key still meets the probabilities' exact zeros, and 0 * NaN is NaN.
            shape = (self.rows, heads, self.capacity, size)
            with torch.inference_mode(False):  # ordinary tensors: commit() also writes outside of inference mode
                buffers[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return buffers[layer]

    # ---- between forward passes

    def commit(self, paths: Sequence[Sequence[int]], recorder: Recorder | None = None) -> None:
        """Keep, for each row of the last forward pass, the tokens of ``path`` (indices into the pass, ascending).

        A path that is a prefix moves nothing; the path of a tree is gathered to the front, in place, by ``recorder`` if it records.
        """
        span = self.span
        assert span is not None and len(paths) == len(span.starts)
        for i, path in enumerate(paths):
            row, start = span.first + i, span.starts[i]
            prefix = list(path) == list(range(len(path)))
            recorded = not prefix and recorder is not None and recorder.on and self._play_keep(recorder, row, start, path)
            if not prefix and not recorded:
                self._keep(row, start, path)
            self.lengths[row] = start + len(path)

    def _keep(self, row: int, start: int, path: Sequence[int]) -> None:
        buffers = [*self.keys.values(), *self.values.values()]
        if self._slots is None or self._slots.count < len(buffers):
            self._slots = Slots.of(buffers)
        if self._slots is not None:
            self._slots.keep(row, start, path)
            return
        source = placed(path, self.device) + start
        for buffer in buffers:
            buffer[row, :, start : start + len(path)] = buffer[row, :, source]

    def _play_keep(self, recorder: Recorder, row: int, start: int, path: Sequence[int]) -> bool:
        """The same as a recorded pass over all buffers, if there is one; padding copies the first token over itself."""
        buffers = [*self.keys.values(), *self.values.values()]
        count = _power(len(path))
        rest = [0] * (count - len(path))
        places = placed([[row] * count, [*path, *rest], [*range(len(path)), *rest]], self.device)
        places[1:] += start

        def run(places: Tensor) -> tuple[Tensor, ...]:
            row, source, kept = places
            for buffer in buffers:
                buffer[row, :, kept] = buffer[row, :, source]
            return ()

        return recorder.play(self, ("keep", count), (places,), run) is not None

    def positions_behind(self, first: int, rows: int, count: int) -> Tensor:
        """``[rows, count]`` int64: the next positions of the rows ``first, first + 1, ...``."""
        starts = placed(self.lengths[first : first + rows], self.device)
        return starts[:, None] + torch.arange(count, device=self.device)

    def truncate(self, row: int, length: int) -> None:
        """Forget everything of a row from position ``length`` on."""
        assert length <= self.lengths[row]
        self.lengths[row] = length

    def move(self, source: int, target: int) -> None:
        """Copy a row over another, so that the rows in use stay the first ones."""
        length = self.lengths[source]
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                buffer[target, :, :length] = buffer[source, :, :length]
        self.lengths[target] = length

    def bytes(self) -> int:
        return sum(b.numel() * b.element_size() for d in (self.keys, self.values) for b in d.values())

    # ---- what transformers asks while it builds masks; the real mask is made in attention.py from the span

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.span.starts) if self.span is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return (self.span.end if self.span is not None else query_length), 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)


def _power(count: int) -> int:
    """The power of two from ``count`` on."""
    return 1 << (count - 1).bit_length()
