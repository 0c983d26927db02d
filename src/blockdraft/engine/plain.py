"""Plain layers: the layers of a Llama-like model over a few tokens as one call of ``layers.c`` (CPUs).

Between its products a layer does some forty small things. Called one by one they take as long as the products of a small model.
A model whose layers look plain is given this path when it loads, and keeps it only if it computes what the model computes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.kernels import MOST_SIZE, Linear, LinearRows, library
from blockdraft.engine.packing import PackedLinear

# Linear layers that read the same tensor, in order: query, key and value apart, as one, or the last two together; gate and up
# apart or as one.
JOINT = ([3, 1, 2, 1], [1, 1, 2, 1], [3, 1, 1, 1], [1, 1, 1, 1], [1, 2, 1, 2, 1])
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # of C's buffers, whatever torch's defaults are


@dataclass(frozen=True)
class PlainLayer:
    """Norm, attention with rotary positions, norm, gated MLP; each added to what went in.

    Attributes:
        norms: weights ``[hidden]`` before attention and MLP.
        head_norms: weights ``[head size]`` of queries and keys, or None.
        first, second: query, key and value in one product; or query, then key and value in another.
        output, up, down: the others; ``up`` is gate and up side by side.
    """

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    first: LinearRows
    second: LinearRows | None
    output: LinearRows
    up: LinearRows
    down: LinearRows


class _Sizes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "rows positions hidden heads kv_heads size inner row_stride head_stride longest mask_stride tap_stride".split()
        )
    ]


class PlainLayers:
    """Layers that run as one call.

    Args:
        layers: of the sizes that ``fits`` proves.
        heads: of queries.
        size: of a head.
        epsilon: of all norms.
    """

    def __init__(self, layers: Sequence[PlainLayer], heads: int, size: int, epsilon: float):
        assert fits(layers, heads, size)
        self.layers, self.heads, self.size, self.epsilon = list(layers), heads, size, epsilon
        self.kv_heads = kv_heads_of(layers[0], heads, size)
        self.hidden, self.inner = layers[0].norms[0].numel(), layers[0].down.inputs
        built = library()
        assert built is not None
        self._library = built
        self._work = torch.empty(0, **FLOATS)
        self._pointers = [self._fixed(layer) for layer in self.layers]

    @staticmethod
    def _fixed(layer: PlainLayer) -> list[int]:
        """Addresses in the order of ``layer`` in ``layers.c``, up to the cache's."""
        query, key = layer.head_norms or (None, None)
        tensors: list[Tensor | None] = [layer.norms[0], query, key, layer.norms[1]]
        addresses = [tensor.data_ptr() if tensor is not None else 0 for tensor in tensors]
        for rows in (layer.first, layer.second, layer.output, layer.up, layer.down):
            found = rows.linear if rows is not None else Linear()
            addresses += [found.weights or 0, found.bias or 0, found.narrow]
        return addresses

    def run(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, span: Span, mask: Tensor | None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run new tokens behind what the cache holds, and write their keys and values there.

        Args:
            x: ``[rows, positions, hidden]``.
            rope: cosines and sines ``[rows or 1, positions, head size]``.
            cache: float32, opened at ``span``.
            mask: additive ``[rows or 1, 1, positions, span.end]``; None: each row's tokens see all of its keys.
            taps: layers whose outputs are kept.

        Returns:
            The last layer's output, and the tapped ones side by side ``[rows, positions, taps * hidden]``, float32.
        """
        rows, positions, hidden = x.shape
        assert len(set(taps)) == len(taps), "a layer is tapped twice"
        x = x.to(torch.float32, copy=True).contiguous()
        features = torch.empty(rows, positions, len(taps) * hidden, **FLOATS) if taps else None
        tapped = (
            {layer: features.data_ptr() + 4 * hidden * place for place, layer in enumerate(taps)} if features is not None else {}
        )
        layers, sizes, given = self._call(x, rope, cache, span, tapped)
        sizes.longest, sizes.tap_stride = 1, len(taps) * hidden
        if mask is not None:
            mask = mask.contiguous()
            sizes.longest, sizes.mask_stride = mask.shape[-1], mask[0].numel() if mask.shape[0] > 1 else 0
        starts = given[-1]
        lengths = (starts + positions if mask is None else torch.full_like(starts, span.end)).int()
        self._library.run_layers(
            layers,
            ctypes.c_int64(len(self.layers)),
            ctypes.byref(sizes),
            *(ctypes.c_void_p(t.data_ptr()) for t in (*given, lengths)),
            ctypes.c_void_p(mask.data_ptr() if mask is not None else None),
            ctypes.c_float(self.epsilon),
            ctypes.c_float(self.size**-0.5),
        )
        return x, features

    def inject(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, span: Span) -> None:
        """Write every layer's keys and values of the same rows, not normed, into the cache: a DFlash's context.

        Args:
            x: ``[rows, positions, hidden]``.
            rope, cache, span: as in ``run``; queries must be a product of their own.
        """
        assert all(layer.second is not None for layer in self.layers), "keys and values are one product with the queries"
        x = x.float().contiguous()
        layers, sizes, given = self._call(x, rope, cache, span, {})
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in given)
        self._library.inject_rows(
            layers, ctypes.c_int64(len(self.layers)), ctypes.byref(sizes), *pointers, ctypes.c_float(self.epsilon)
        )

    def _call(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, span: Span, tapped: dict[int, int]
    ) -> tuple["ctypes.Array[ctypes.c_int64]", _Sizes, tuple[Tensor, ...]]:
        """What both calls of C are given: layers, sizes, and x, scratch, cosines, sines and starts.

        Args:
            tapped: where each tapped layer's output goes.
        """
        rows, positions, hidden = x.shape
        assert hidden == self.hidden and rope[0].shape[1:] == (positions, self.size), "sizes of other layers"
        cosines, sines = (t.float().expand(rows, -1, -1).contiguous() for t in rope)
        buffers = [cache.buffers(layer, self.kv_heads, self.size) for layer in range(len(self.layers))]
        strides = buffers[0][0].stride()
        at = 4 * span.first * strides[0]
        table: list[int] = []
        for index, (fixed, (keys, values)) in enumerate(zip(self._pointers, buffers, strict=True)):
            table += [*fixed, keys.data_ptr() + at, values.data_ptr() + at, tapped.get(index, 0)]
        shape = (rows, positions, hidden, self.heads, self.kv_heads, self.size, self.inner)
        sizes = _Sizes(*shape, strides[0], strides[1])
        needed = self._library.floats_of_work(ctypes.byref(sizes))
        if self._work.numel() < needed:
            self._work = torch.empty(needed, **FLOATS)
        starts = torch.tensor(span.starts, dtype=torch.int64, device="cpu")
        return (ctypes.c_int64 * len(table))(*table), sizes, (x, self._work, cosines, sines, starts)


def kv_heads_of(layer: PlainLayer, heads: int, size: int) -> int:
    """Heads of keys, by the width of the joint product."""
    joint = layer.first.outputs + (layer.second.outputs if layer.second is not None else 0)
    return (joint // size - heads) // 2


def fits(layers: Sequence[PlainLayer], heads: int, size: int) -> bool:
    """Whether all layers have the sizes that C will take for granted."""
    hidden, kv_heads = layers[0].norms[0].numel(), kv_heads_of(layers[0], heads, size)
    if not 0 < size <= MOST_SIZE or size % 2 or kv_heads < 1 or heads % kv_heads:
        return False
    inner = layers[0].down.inputs
    for layer in layers:
        query = heads * size if layer.second is not None else (heads + 2 * kv_heads) * size
        second = layer.second if layer.second is not None else layer.first
        found = (
            *(norm.numel() for norm in layer.norms),
            *(norm.numel() for norm in layer.head_norms or ()),
            *(layer.first.inputs, layer.first.outputs, second.inputs, second.outputs),
            *(layer.output.inputs, layer.output.outputs, layer.up.inputs, layer.up.outputs, layer.down.inputs, layer.down.outputs),
        )
        head_norms = (size, size) if layer.head_norms is not None else ()
        behind = 2 * kv_heads * size if layer.second is not None else query
        wanted = (
            hidden,
            hidden,
            *head_norms,
            hidden,
            query,
            hidden,
            behind,
            heads * size,
            hidden,
            hidden,
            2 * inner,
            inner,
            hidden,
        )
        if found != wanted:
            return False
    return True


def plain_layer(groups: Sequence[Sequence[nn.Module]], norms: Sequence[nn.Module], size: int) -> PlainLayer | None:
    """A layer by its packed linear layers, in groups that read the same tensor, and its norms; None if it looks otherwise."""
    packed = [group[0].packed.rows for group in groups if isinstance(group[0], PackedLinear)]
    joint = [len(group) for group in groups]
    if len(packed) != len(groups) or None in packed or joint not in JOINT:
        return None
    weights = [norm.get_parameter("weight").detach().float().contiguous() for norm in norms]
    shapes = [weight.numel() for weight in weights]
    if len(weights) == 4 and shapes[1:3] == [size, size]:
        outer, inner = (weights[0], weights[3]), (weights[1], weights[2])
    elif len(weights) == 2:
        outer, inner = (weights[0], weights[1]), None
    else:
        return None
    first, second = (packed[0], packed[1]) if len(packed) == 5 else (packed[0], None)
    return PlainLayer(outer, inner, first, second, *packed[-3:])
