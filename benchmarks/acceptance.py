"""Acceptance of a drafter on the evaluation tasks: greedy, chain, no tree.

    python benchmarks/acceptance.py [--drafter FOLDER] [--limit 6] [--tokens 128] [--dtype bfloat16] [--data-dir DIR]

Per task: acceptance length pooled over rounds, and the share of rounds whose first drafted token stood. First turns only.
"""

import argparse
import json
from pathlib import Path

import transformers

from blockdraft import load_drafter, load_target
from blockdraft.decode import decode
from blockdraft.prompts import encode
from blockdraft.request import Request
from blockdraft.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "eval"


def measure(target, drafter, prompts, tokens, batch_size):
    """Acceptance length, first-slot acceptance and rounds over prompts."""
    requests = [Request(encode(target, text), SamplingParams(max_new_tokens=tokens), target) for text in prompts]
    for _ in decode(target, drafter, requests, batch_size):
        pass
    rounds = sum(request.rounds for request in requests)
    emitted = sum(len(request.output) - 1 for request in requests)
    first = sum(request.accepted_at[0] if request.accepted_at else 0 for request in requests)
    return emitted / rounds, first / rounds, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    target = load_target(args.target, dtype=args.dtype)
    drafter = load_drafter(args.drafter, target)
    print(f"{target.name}, {drafter.name}, {target.dtype}, {args.limit} prompts per task, {args.tokens} tokens")
    results = []
    for file in sorted(args.data_dir.glob("*.jsonl")):
        prompts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()[: args.limit]]
        results.append(measure(target, drafter, prompts, args.tokens, args.batch_size))
        print(f"{file.stem:14} acceptance length {results[-1][0]:.2f}  first slot {results[-1][1]:.2f}  rounds {results[-1][2]}")
    print(f"{'mean':14} acceptance length {sum(r[0] for r in results) / len(results):.2f}  ", end="")
    print(f"first slot {sum(r[1] for r in results) / len(results):.2f}")


if __name__ == "__main__":
    main()
