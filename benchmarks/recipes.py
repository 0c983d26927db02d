"""Recipes against each other: the same corpus, the same number of steps, one line each.

    python benchmarks/recipes.py configs/smollm2-135m.yaml corpus=[corpus] max_steps=300 -- layers=3 -- block_size=6 -- kl_weight=0

What stands in front of the first ``--`` is common; every ``--`` begins a variant, the first is the common recipe itself. Held-out
conversations of the corpus judge: the estimate over fixed blocks of the whole vocabulary, and the real acceptance length. The
evaluation prompts are never read here. Lines are appended to ``--out`` (default: recipes.jsonl), one JSON object each.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from blockdraft.training.config import read_config
from blockdraft.training.evaluate import as_drafter, decode_held_out, estimate, spread
from blockdraft.training.trainer import Trainer


def main() -> None:
    arguments, out = sys.argv[1:], Path("recipes.jsonl")
    if "--out" in arguments:
        at = arguments.index("--out")
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            groups.append([])
        else:
            groups[-1].append(argument)
    common = groups[0]
    path = Path(common.pop(0)) if common and "=" not in common[0] else None
    for variant in ([], *groups[1:]):
        line = json.dumps({"variant": " ".join(variant) or "as it is", **measured(path, [*common, *variant])})
        print(line, flush=True)
        with out.open("a") as file:
            file.write(line + "\n")


def measured(path: Path | None, overrides: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(read_config(path, [*overrides, f"out={folder}", "evaluate_every=1000000", "checkpoint_every=1000000"]))
        began = time.perf_counter()
        while trainer.step < trainer.run.steps:
            sums, _, _ = trainer.learner.step(trainer.step)
            trainer.step += 1
        seconds = time.perf_counter() - began
        weights = {name: tensor.detach().float().cpu() for name, tensor in trainer.run.network.state_dict().items()}
        held_out = estimate(trainer.learner, weights)
        config = trainer.config
        drafter = as_drafter(trainer.run.network, weights, trainer.target)
        documents = spread(trainer.run.documents.held_out, config.evaluate_prompts)
        real = decode_held_out(trainer.target, drafter, documents, config.evaluate_tokens)
    blocks = trainer.run.steps * config.rows * config.anchors
    return {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "steps": trainer.run.steps,
        "blocks_per_second": round(blocks / seconds, 1),
        "training_estimate": round(sums.figures()["estimated_tau"], 3),
        "held_out_estimate": round(held_out["estimated_tau"], 3),
        "held_out_first_slot": round(held_out["first_slot"], 3),
        "held_out_cross_entropy": round(held_out["cross_entropy"], 3),
        "real_tau": round(real.tau or 0, 3),
        "real_first_slot": round(real.first_slot or 0, 3),
    }


if __name__ == "__main__":
    main()
