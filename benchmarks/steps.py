"""What the parts of a round cost: a plain step, verifications, a draft, a tree; against what memory allows.

    python benchmarks/steps.py [--target smollm2-135m] [--drafter FOLDER] [--dtype float32] [--context 256]

Medians of 15, interleaved, in milliseconds. "own forward": the model's layers called as transformers calls them, over packed
weights.
"""

import argparse
import statistics
import time

import torch

from blockdraft import load_drafter, load_target
from blockdraft.drafters.tree import grow
from blockdraft.rules.accept import follow
from blockdraft.rules.proposal import Proposal

SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 15


def medians(works: dict[str, object]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(REPEATS + 2):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if repeat > 1:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype")
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, target)
    cache = target.new_cache(1, args.context + max(SIZES) + 1)
    drafter.reset(1, args.context + max(SIZES) + 1)
    ids = torch.randint(100, 40_000, (args.context,), generator=torch.Generator().manual_seed(0)).tolist()
    for _, features in target.prefill(cache, 0, ids, drafter.taps):
        drafter.observe(0, torch.tensor([ids[: features.shape[1]]]), features, [features.shape[1]])
    anchor = torch.tensor(ids[:1])

    def verify(size):
        if size == 1:
            target.step(cache, anchor)
            cache.truncate(0, args.context)
            return
        target.verify(cache, anchor, Proposal(torch.arange(size - 1)[None], [size], torch.arange(size - 1)[None]), drafter.taps)

    large = torch.randn(128 << 20)
    bandwidth = 4 * large.numel() / medians({"read": lambda: large.sum()})["read"] / 1e6
    read = {id(p): p.numel() * p.element_size() for p in target.model.parameters()}
    bound = sum(read.values()) / bandwidth / 1e6
    print(
        f"{target.name}, {target.dtype}: {sum(read.values()) / 1e6:.0f} MB of weights, read at {bandwidth:.1f} GB/s: {bound:.1f} ms"
    )
    plain = target._plain
    rows = {"one call" if plain is not None else "own forward": plain}
    if plain is not None:
        rows["own forward"] = None
    for name, path in rows.items():
        target._plain = path
        found = medians({str(size): (lambda size=size: verify(size)) for size in SIZES})
        cells = "  ".join(f"{size}: {ms:.1f} ({ms / found['1']:.2f}x)" for size, ms in found.items())
        print(f"tokens of a pass, {name}: {cells}; a step is {found['1'] / bound:.2f}x of its bytes")
    target._plain = plain
    logs, words = drafter.likely(anchor, [drafter.block_size], 64)
    none, copies = logs.new_empty(1, 0), torch.randint(0, 9999, (1, 32))
    falling = -torch.arange(1.0, 33.0)[None] / 4
    tokens, parents, _ = grow(logs, words, words.new_empty(1, 0), none, 64)
    some = features[:, :3]

    def observe():
        drafter.observe(0, torch.zeros(1, 3, dtype=torch.long), some, [3])
        drafter.truncate(0, args.context)

    found = medians(
        {
            f"a draft of {drafter.block_size} slots, its head and 64 best words each": lambda: drafter.likely(
                anchor, [drafter.block_size], 64
            ),
            "taking in 3 tokens": observe,
            "a tree of 64": lambda: grow(logs, words, words.new_empty(1, 0), none, 64),
            "a tree of 64 with a copy of 32": lambda: grow(logs, words, copies, falling, 64),
            "its mask": lambda: Proposal(tokens, [65], parents).visible(),
            "walking it": lambda: follow(tokens[0].tolist(), parents[0].tolist(), lambda node, _: 0),
        }
    )
    print("; ".join(f"{name} {ms:.2f}" for name, ms in found.items()))


if __name__ == "__main__":
    main()
