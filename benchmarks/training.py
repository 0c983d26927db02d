"""Speed of a training step with features in memory: blocks per second, and which share of the time is matrix products.

    python benchmarks/training.py corpus=corpus block_size=16 rows=2 anchors=32

The share is what the products of a step would take alone, each timed on tensors of its own shape (forward, and the two products
of its backward pass; one for the frozen head), over the time of the whole step.
"""

import json
import sys
import tempfile
import time

import torch

from blockdraft.training.config import read_config
from blockdraft.training.run import precision_of
from blockdraft.training.trainer import Trainer

STEPS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        config = read_config(None, [*sys.argv[1:], "features=memory", f"out={out}"])
        trainer = Trainer(config)
        trainer.learner.features.of(range(0))
        rows = [row for step in range(STEPS + 2) for row in trainer.run.batches.step(step) if row is not None]
        trainer.learner.features.of([i for row in rows for i in trainer.run.batches.packed[row]])
        for _ in range(2):
            trainer.learner.step(trainer.step)
            trainer.step += 1
        began = time.perf_counter()
        for _ in range(STEPS):
            trainer.learner.step(trainer.step)
            trainer.step += 1
        seconds = (time.perf_counter() - began) / STEPS
        precision = precision_of(config, trainer.device)
        products = product_seconds(trainer, precision)
    blocks = config.rows * config.anchors
    print(
        json.dumps(
            {
                "blocks_per_second": round(blocks / seconds, 1),
                "block_size": config.block_size,
                "step_seconds": round(seconds, 3),
                "product_seconds": round(sum(products.values()), 3),
                "share_of_products": round(sum(products.values()) / seconds, 3),
                "products": {name: round(value, 3) for name, value in products.items()},
                "precision": str(precision),
                "threads": torch.get_num_threads(),
            }
        )
    )


def product_seconds(trainer: Trainer, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of the matrix products of one step, by part."""
    c, d = trainer.config, trainer.run.network.config
    pieces = -(-c.rows // (c.micro_rows or c.rows))
    slots, context = c.rows * c.anchors * c.block_size // pieces, c.rows * c.sequence_length // pieces
    body, injected = 0.0, 0.0
    for name, parameter in trainer.run.network.named_parameters():
        if parameter.dim() == 2:
            outputs, inputs = parameter.shape
            if "fc" not in name:
                body += 3 * timed(slots, inputs, outputs, dtype)
            if "fc" in name or "k_proj" in name or "v_proj" in name:
                injected += 3 * timed(context, inputs, outputs, dtype)
    words = c.vocabulary or len(trainer.run.words.weight)
    passes = 2 + (c.kl_weight > 0)
    head = (
        passes
        * timed(min(512, slots), d.backbone.hidden_size, words, dtype)
        * slots
        * (c.block_size - 1)
        / c.block_size
        / min(512, slots)
    )
    return {"layers": body * pieces, "context": injected * pieces, "head": head * pieces}


def timed(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        times.append(time.perf_counter() - began)
    return sorted(times)[1]


if __name__ == "__main__":
    main()
