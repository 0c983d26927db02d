"""What this machine's memory allows, how the C library hands it out, and how numbers get to a device."""

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def available_memory() -> float:
    """Bytes that can be taken without swapping; infinite where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return float("inf")


def placed(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of Python as a tensor on a device.

    On CUDA the copy waits its turn like a kernel; ``torch.tensor`` would have Python wait for all that was launched before it.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)


@cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees, for long work with large tensors on a CPU.

    By default glibc gives every block above 128 KiB to 32 MiB back to the system and gets it again page by page, with a fault and
    zeroing each: 15 to 25 % of a training step, or of a pass over prompts. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc takes
    mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_TOP_PAD, 64 << 20)
