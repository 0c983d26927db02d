"""Precision: in which dtype this processor multiplies hundreds of rows fastest, measured once and kept in the store.

What a processor says of itself does not tell: of two with AVX512-BF16 and no AMX one multiplied bfloat16 1.7 times as fast as
float32, the other 0.7 times.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from blockdraft.engine.kernels import processor
from blockdraft.files import store_folder, write_whole

ROWS, WIDTH, WIDE = 1024, 768, 2048  # of the product that is timed: a step's, of a small drafter
REPEATS = 6
CHOICES = (torch.float32, torch.bfloat16)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """The dtype whose products take the least time: bfloat16 on GPUs, on a CPU what was measured there, which is said once."""
    if device.type != "cpu":
        return torch.bfloat16
    place = store_folder() / "precision.json"
    machine = f"{processor()} torch {torch.__version__} threads {torch.get_num_threads()}"
    try:
        found = json.loads(place.read_text())
        if found["machine"] == machine:
            return CHOICES[found["choice"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    seconds = measure(product_seconds)
    choice = min(range(len(CHOICES)), key=seconds.__getitem__)
    flop = 3 * 2 * ROWS * WIDTH * WIDE
    rates = [f"{name} at {flop / least / 1e9:.0f} GFLOP/s" for name, least in zip(("float32", "bfloat16"), seconds, strict=True)]
    print(
        f"blockdraft: training takes the faster of {' and '.join(rates)}; measured once, kept for the next start", file=sys.stderr
    )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, lambda path: path.write_text(json.dumps({"machine": machine, "choice": choice, "seconds": seconds})))
    except OSError:
        pass  # a store that cannot be written costs a measurement per start, and nothing else
    return CHOICES[choice]


def measure(seconds_of: Callable[[torch.dtype], float]) -> list[float]:
    """The least time of each choice, measured in turn: a machine that slows down meanwhile slows both."""
    least = [float("inf")] * len(CHOICES)
    for _ in range(REPEATS):
        for i, dtype in enumerate(CHOICES):
            least[i] = min(least[i], seconds_of(dtype))
    return least


def product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a linear layer's three products: forward, gradient of its input, gradient of its weights."""
    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDE, WIDTH, dtype=dtype)
    began = time.perf_counter()
    out = F.linear(x, weight)
    torch.mm(out, weight)
    torch.mm(out.t(), x)
    return time.perf_counter() - began
