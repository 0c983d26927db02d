"""The plan of a run: what will be read, how large everything is, how long it may take. Nothing is written."""

import time
from dataclasses import dataclass

import torch

from blockdraft.progress import duration
from blockdraft.training.features import Features
from blockdraft.training.run import Run


@dataclass(frozen=True)
class Cost:
    """Multiplications and additions of one step, by part (a backward pass counts twice its forward)."""

    features: float
    layers: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.features + self.layers + self.attention + self.head


def cost(run: Run) -> Cost:
    """Estimate of the arithmetic of a step, in floating-point operations."""
    c, d = run.config, run.network.config
    width, words = d.backbone.hidden_size, len(run.words.weight)
    slots = c.rows * c.anchors * c.block_size
    tokens = sum(len(document.ids) for document in run.documents.train) / run.batches.steps_per_epoch
    kv = sum(p.numel() for n, p in run.network.named_parameters() if "k_proj" in n or "v_proj" in n)
    fc = run.network.fc.weight.numel()
    body = sum(p.numel() for p in run.network.parameters()) - fc
    of_target = sum(p.numel() for layer in run.target.layers for p in layer.parameters())
    heads = d.backbone.num_attention_heads * d.backbone.head_dim
    keys = c.sequence_length + c.anchors * c.block_size
    looked = c.vocabulary or words
    once = 1.0 if c.features == "online" else 1 / max(1.0, run.steps / run.batches.steps_per_epoch)
    return Cost(
        features=2 * tokens * of_target * once,
        layers=6 * (slots * body + c.rows * c.sequence_length * (fc + kv)),
        attention=12 * len(d.causal) * slots * keys * heads,
        head=(4 + 2 * (c.kl_weight > 0)) * c.rows * c.anchors * (c.block_size - 1) * width * looked,
    )


def speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of this machine's matrix products, measured now."""
    a, b = (torch.randn(1024, 1024, device=device, dtype=dtype) for _ in range(2))
    a @ b
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.3:
        c = a @ b
        count += 1
    c.sum().item()
    return count * 2 * 1024**3 / (time.perf_counter() - began)


def plan(run: Run, precision: torch.dtype) -> str:
    """The plan as text."""
    c, d, documents = run.config, run.network.config, run.documents
    parameters, device = sum(p.numel() for p in run.network.parameters()), str(run.target.device)
    answer = sum(documents.tokens.values())
    per_epoch = run.batches.steps_per_epoch
    blocks = run.steps * c.rows * c.anchors
    features = Features(run.target, documents.train, d.taps, c.kl_weight > 0)
    one, rate = cost(run), speed(run.target.device, precision)
    words = c.vocabulary or len(run.words.weight)
    seconds = one.total * run.steps / rate / 0.6  # what is not matrix products takes the rest
    kept = 0 if c.features == "online" else features.bytes()
    memory = 16 * parameters + run.words.weight.numel() * 4 + (kept if c.features == "memory" else 0)
    precise, of_target = (str(x).removeprefix("torch.") for x in (precision, run.target.dtype))
    weighing = f"D-PACE {c.dpace:g}" if c.dpace else f"exp(-(k-1)/{c.decay:g})"
    told = {
        "target": [f"{run.target.name}, {len(run.target.layers)} layers of width {run.target.hidden_size}", of_target, device],
        "corpus": [f"{', '.join(c.corpus)}: {len(documents.train):,} conversations", f"{answer:,} answer tokens"],
        "": [f"{len(documents.held_out)} held out, {documents.cut} cut at {c.sequence_length}, {documents.dropped} without use"],
        "sources": [f"{source} {100 * count / answer:.0f} %" for source, count in documents.tokens.most_common()],
        "drafter": [f"{parameters:,} parameters", f"{2 * parameters / 1e6:.1f} MB in bfloat16", f"{len(d.causal)} layers"],
        " ": [f"block {d.block_size}, taps {list(d.taps)}", f"mask token {d.mask_token_id}", f"first weights: {c.init}"],
        "batches": [
            f"{len(run.batches.packed):,} rows of {c.sequence_length} tokens",
            f"{c.rows} a step",
            f"{c.anchors} blocks each",
        ],
        "steps": [f"{run.steps:,} ({run.steps / per_epoch:.2f} epochs of {per_epoch:,})"],
        "blocks": [f"{blocks:,}", f"{blocks / answer:.2f} for each answer token"],
        "loss": [f"{c.ce_weight:g} x cross entropy + {c.kl_weight:g} x KL over {words:,} words", f"weights {weighing}"],
        "features": [f"{c.features}; kept, they are {features.bytes() / 1e9:.1f} GB"],
        "memory": [f"about {memory / 1e9:.1f} GB besides target and activations"],
        "arithmetic": [f"{one.total / 1e9:.0f} GFLOP a step", *(f"{k} {100 * v / one.total:.0f} %" for k, v in vars(one).items())],
        "time": [f"about {duration(seconds)}, if products take 60 % of it at the measured {rate / 1e9:.0f} GFLOP/s in {precise}"],
        "out": [c.out or "not named yet"],
    }
    return "\n".join(f"{name:11}{', '.join(parts)}" for name, parts in told.items())
