"""Weights of linear layers laid out once, so that a CPU reads them at memory speed.

A plain ``nn.Linear`` over a handful of rows runs at a fraction of the memory bandwidth: the matrix is traversed in a
layout made for other shapes, or reordered in every call. Packed once, products of a handful of rows cost little more than
those of one: the property that speculative decoding lives on. Weights are packed for our own kernel (``linear.c``) where a
compiler is at hand, but for oneDNN's in bfloat16 on processors with AMX. Layers that read the same tensor
(query, key and value; gate and up) are packed as one matrix. ``docs/architecture.md`` has the measured figures.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.engine.kernels import LinearRows, library
from blockdraft.engine.memory import available_memory

ROWS_HINT = 8  # oneDNN picks the layout for a number of rows; 8 serves 1 to 32 rows well (benchmarks/linear.py)


class Packed:
    """The packed weights of linear layers that read the same tensor, one product for all of them.

    Args:
        linears: layers of equal input width; all have a bias or none has.
        own: take our own kernel where oneDNN's would be faster.

    Attributes:
        rows: the layers as our own kernel sees them; None if oneDNN multiplies.
    """

    def __init__(self, linears: Sequence[nn.Linear], own: bool = False):
        weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight.detach()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        if has_own_kernel(weight.dtype, own):
            rows = LinearRows(weight, bias)
            self.rows: LinearRows | None = rows
            self._multiply: Callable[[Tensor], Tensor] = lambda x: rows(x).to(x.dtype)
        else:
            self.rows = None
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
            self._multiply = lambda x: torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
        self._readers = len(linears)
        self._last: tuple[Tensor, Tensor, int] | None = None  # input, product, readers that have not had it yet

    def product(self, input: Tensor) -> Tensor:
        """``[..., all outputs]``; the siblings' calls with the very same tensor share one computation."""
        last = self._last
        if last is not None and last[0] is input:
            _, output, waiting = last
        else:
            output = self._multiply(input)
            waiting = self._readers
        # The last reader drops it: a buffer that is refilled later under the same identity is multiplied anew.
        self._last = (input, output, waiting - 1) if waiting > 1 else None
        return output


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` that multiplies with packed weights whenever no gradient is asked for."""

    packed: Any  # Packed; nn.Module's attributes know only tensors and modules
    outputs: Any  # slice

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        return self.packed.product(input)[..., self.outputs]


def has_own_kernel(dtype: torch.dtype, own: bool = False) -> bool:
    """True where ``linear.c`` multiplies: float32, and bfloat16 on processors without AMX, or if asked.

    With AVX512-BF16 alone a pass through oneDNN was the slower one where it was measured: docs/results.md, "bfloat16 without AMX".
    """
    ours = dtype == torch.float32 or (dtype == torch.bfloat16 and (own or not cpu_has_amx()))
    return ours and library() is not None


def cpu_multiplies_bfloat16() -> bool:
    """AMX or AVX512-BF16: without them bfloat16 is emulated, slower than float32."""
    return cpu_has_amx() or _cpu_is("_is_avx512_bf16_supported")


def cpu_has_amx() -> bool:
    """Whether matrices are multiplied tile by tile: 16 rows then cost what one costs."""
    return _cpu_is("_is_amx_tile_supported")


def _cpu_is(name: str) -> bool:
    test = getattr(torch.cpu, name, None)
    return test is not None and bool(test())


def can_pack(dtype: torch.dtype, device: torch.device, own: bool = False) -> bool:
    """True where there is a kernel for this dtype, our own or oneDNN's."""
    if device.type == "cpu" and has_own_kernel(dtype, own):
        return True
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops, "mkldnn"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(groups: Sequence[Sequence[nn.Linear]], dtype: torch.dtype, device: torch.device, own: bool = False) -> int:
    """Pack groups of plain linear layers in place; the parameters stay as they are.

    Args:
        groups: layers that read the same tensor, in one forward pass each exactly once.
        own: with our own kernel, whose rows do not depend on each other, also where oneDNN's is faster.

    Returns:
        The bytes that the packed copies take: 0 if this machine cannot pack, or has no memory for a second copy.
    """
    if not can_pack(dtype, device, own):
        return 0
    groups = [[m for m in group if type(m) is nn.Linear and m.weight.dtype == dtype] for group in groups]
    needed = sum(m.weight.numel() * m.weight.element_size() for group in groups for m in group)
    if needed > 0.5 * available_memory():
        warnings.warn(f"{needed >> 20} MiB of packed weights do not fit into memory: linear layers run unpacked, slower")
        return 0
    for group in filter(None, groups):
        packed, start = Packed(group, own), 0
        for linear in group:
            linear.__class__ = PackedLinear
            member = cast(PackedLinear, linear)
            member.packed, member.outputs = packed, slice(start, start + linear.out_features)
            start += linear.out_features
    return needed


def unpack_linears(groups: Sequence[Sequence[nn.Linear]]) -> None:
    """Undo ``pack_linears``."""
    for linear in (linear for group in groups for linear in group if isinstance(linear, PackedLinear)):
        del linear.packed, linear.outputs
        linear.__class__ = nn.Linear  # type: ignore[assignment]
