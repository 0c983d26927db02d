"""Weights of linear layers laid out once for oneDNN, so that a CPU reads them at memory speed.

A plain ``nn.Linear`` over a handful of rows runs at a fraction of the memory bandwidth: the matrix is traversed in a
layout made for other shapes, or reordered in every call. Packed once, products of 1 to 16 rows cost about the same: the
property that speculative decoding lives on. ``docs/architecture.md`` has the measured figures.
"""

import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 8  # oneDNN picks the layout for a number of rows; 8 serves 1 to 32 rows well (benchmarks/linear.py)


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` that multiplies with its packed weight whenever no gradient is asked for."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input.contiguous(), self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where torch has the oneDNN kernels for this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops, "mkldnn"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(module: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Pack every plain linear layer of a module in place; the parameters stay as they are.

    Returns:
        The bytes that the packed copies take: 0 if this machine cannot pack, or has no memory for a second copy.
    """
    if not can_pack(dtype, device):
        return 0
    linears = [m for m in module.modules() if type(m) is nn.Linear and m.weight.dtype == dtype]
    needed = sum(m.weight.numel() * m.weight.element_size() for m in linears)
    if needed > 0.5 * available_memory():
        warnings.warn(f"{needed >> 20} MiB of packed weights do not fit into memory: linear layers run unpacked, slower")
        return 0
    with torch.no_grad():
        for linear in linears:
            linear.__class__ = PackedLinear
            linear.packed = pack(linear.weight)
    return needed


def available_memory() -> float:
    """Bytes that can be taken without swapping; infinite where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return float("inf")


def pack(weight: Tensor) -> Tensor:
    """The packed form of a weight ``[out, in]``; opaque, only for ``torch.ops.mkldnn._linear_pointwise``."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
