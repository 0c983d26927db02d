"""What a product of a few rows costs with plain and with packed weights: all linear layers and the head of a 135M Llama.

    python benchmarks/linear.py

The shapes are those of SmolLM2-135M; random weights, median of 15 calls over all layers, so that caches are cold.
"""

import statistics
import time

import torch
from torch import nn

from blockdraft.engine.packing import pack_linears

LAYERS, HIDDEN, KV, INNER, ROWS = 30, 576, 192, 1536, 49152


def model(dtype: torch.dtype) -> list[list[nn.Linear]]:
    """Groups of layers that read the same tensor: query, key, value; output; gate, up; down; and the head."""
    shapes = [[(HIDDEN, HIDDEN), (HIDDEN, KV), (HIDDEN, KV)], [(HIDDEN, HIDDEN)], [(HIDDEN, INNER)] * 2, [(INNER, HIDDEN)]]
    groups = [[nn.Linear(i, o, bias=False, dtype=dtype) for i, o in group] for _ in range(LAYERS) for group in shapes]
    return [*groups, [nn.Linear(HIDDEN, ROWS, bias=False, dtype=dtype)]]


def milliseconds(groups: list[list[nn.Linear]], rows: int, dtype: torch.dtype) -> float:
    def once() -> float:
        began = time.perf_counter()
        for group in groups:
            x = torch.ones(rows, group[0].in_features, dtype=dtype)
            for linear in group:
                linear(x)
        return time.perf_counter() - began

    once()
    return 1e3 * statistics.median(once() for _ in range(15))


def main() -> None:
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            groups = model(dtype)
            for kind in ("plain", "packed"):
                if kind == "packed" and not pack_linears(groups, dtype, torch.device("cpu")):
                    print(f"{dtype}: this machine cannot pack")
                    continue
                times = {rows: milliseconds(groups, rows, dtype) for rows in (1, 2, 4, 8, 16, 32, 64)}
                print(f"{dtype} {kind:7}", "  ".join(f"{rows}: {ms:.1f} ms" for rows, ms in times.items()))


if __name__ == "__main__":
    main()
