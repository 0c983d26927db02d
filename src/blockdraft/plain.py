"""Plain layers: the layers of a Llama-like model over a few tokens as one call of ``layers.c`` (CPUs).

Between its products a layer does some forty small things. Called one by one they take as long as the products of a small model.
A model whose layers look plain is given this path when it loads, and keeps it only if it computes what the model computes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.cache import KVCache, Span
from blockdraft.kernels import Linear, LinearRows, library
from blockdraft.packing import PackedLinear

# Linear layers that read the same tensor, in order: query, key and value apart, as one, or the last two together; gate and up
# apart or as one.
JOINT = ([3, 1, 2, 1], [1, 1, 2, 1], [3, 1, 1, 1], [1, 1, 1, 1], [1, 2, 1, 2, 1])


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
        layers: of one size.
        heads: of queries.
        size: of a head.
        epsilon: of all norms.
    """

    def __init__(self, layers: Sequence[PlainLayer], heads: int, size: int, epsilon: float):
        self.layers, self.heads, self.size, self.epsilon = list(layers), heads, size, epsilon
        joint = layers[0].first.outputs + (layers[0].second.outputs if layers[0].second is not None else 0)
        self.kv_heads = (joint // size - heads) // 2
        self.hidden, self.inner = layers[0].norms[0].numel(), layers[0].down.inputs
        built = library()
        assert built is not None
        self._library = built
        self._work = torch.empty(0)
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
        x = x.to(torch.float32, copy=True).contiguous()
        cosines, sines = (t.float().expand(rows, -1, -1).contiguous() for t in rope)
        buffers = [cache.buffers(layer, self.kv_heads, self.size) for layer in range(len(self.layers))]
        strides = buffers[0][0].stride()
        features = torch.empty(rows, positions, len(taps) * hidden) if taps else None
        tapped = {layer: 4 * hidden * place for place, layer in enumerate(taps)}
        table: list[int] = []
        for index, (fixed, (keys, values)) in enumerate(zip(self._pointers, buffers, strict=True)):
            at = 4 * span.first * strides[0]
            tap = features.data_ptr() + tapped[index] if features is not None and index in tapped else 0
            table += [*fixed, keys.data_ptr() + at, values.data_ptr() + at, tap]
        sizes = _Sizes(
            rows,
            positions,
            hidden,
            self.heads,
            self.kv_heads,
            self.size,
            self.inner,
            strides[0],
            strides[1],
            1,
            0,
            len(taps) * hidden,
        )
        if mask is not None:
            mask = mask.contiguous()
            sizes.longest, sizes.mask_stride = mask.shape[-1], mask[0].numel() if mask.shape[0] > 1 else 0
        needed = self._library.floats_of_work(ctypes.byref(sizes))
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
        starts = torch.tensor(span.starts)
        lengths = (starts + positions).int() if mask is None else torch.full((rows,), span.end, dtype=torch.int32)
        self._library.run_layers(
            (ctypes.c_int64 * len(table))(*table),
            ctypes.c_int64(len(self.layers)),
            ctypes.byref(sizes),
            *(ctypes.c_void_p(t.data_ptr()) for t in (x, self._work, cosines, sines, starts, lengths)),
            ctypes.c_void_p(mask.data_ptr() if mask is not None else None),
            ctypes.c_float(self.epsilon),
            ctypes.c_float(self.size**-0.5),
        )
        return x, features


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
