"""Acceptance and speed by the length of the context, for the chain and the tree, drawn.

    python benchmarks/contexts.py [--lengths 256,1024,2048,4096,8000] [--tokens 96] [--out contexts.json] [--png contexts.png]

The context is source code of Python's standard library, which every machine has: the first so many tokens of a module, to be
continued. Greedy, one row, methods interleaved; plain decoding of the same prompt is the baseline.
"""

import argparse
import inspect
import json
import random
import statistics
import tarfile
import typing
from pathlib import Path

from blockdraft import load_drafter, load_target
from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.generation import with_tree
from blockdraft.rules.sampling import SamplingParams

MODULES = (typing, tarfile, inspect)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype")
    parser.add_argument("--lengths", default="256,1024,2048,4096,8000")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, target)
    methods = {"ar": None, "chain": drafter, "tree": with_tree(target, drafter)}
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    order, found = random.Random(0), []
    for length in map(int, args.lengths.split(",")):
        requests: dict[str, list[Request]] = {name: [] for name in methods}
        for module in MODULES:
            ids = target.tokenizer(inspect.getsource(module))["input_ids"]
            if len(ids) < length:
                raise SystemExit(f"{module.__name__} has {len(ids)} tokens only; ask for fewer than {length}")
            for name in order.sample(list(methods), len(methods)):
                request = Request(ids[:length], params, target)
                for _ in decode(target, methods[name], [request]):
                    pass
                requests[name].append(request)
        for name, done in requests.items():
            ratios = [a.decode_seconds / b.decode_seconds for a, b in zip(requests["ar"], done, strict=True)]
            rounds = sum(request.rounds for request in done)
            emitted = sum(len(request.output) - 1 for request in done)
            found.append(
                {
                    "context": length,
                    "method": name,
                    "tokens_per_second": emitted / sum(request.decode_seconds for request in done),
                    "speedup": statistics.median(ratios),
                    "acceptance_length": emitted / rounds if rounds else None,
                    "identical": all(a.output == b.output for a, b in zip(requests["ar"], done, strict=True)),
                    "first_token_s": statistics.median(request.prefill_seconds for request in done),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.png:
        draw(found, args.png)


def draw(found: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, key, label in zip(
        panels, ("tokens_per_second", "acceptance_length"), ("tokens per second", "acceptance length"), strict=True
    ):
        for method in ("ar", "chain", "tree"):
            points = [(row["context"], row[key]) for row in found if row["method"] == method and row[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=method)
        axes.set(xlabel="tokens of context", ylabel=label, xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
