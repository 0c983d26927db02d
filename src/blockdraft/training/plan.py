"""The plan of a run: what will be read, how large everything is, how long it may take. Nothing is written."""

import time
from dataclasses import dataclass

import torch

from blockdraft.drafters.eagle3 import Eagle3
from blockdraft.drafters.network import DFlash
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
    c, network = run.config, run.network
    own = isinstance(network, Eagle3)
    width, words = network.config.backbone.hidden_size, _words(run)
    tokens = sum(len(document.ids) for document in run.documents.train) / run.batches.steps_per_epoch
    answers = sum(run.documents.tokens.values()) / run.batches.steps_per_epoch
    blocks = min(c.rows * c.anchors, answers) if own else c.rows * c.anchors
    # A DFlash runs every slot and injects every token; an EAGLE-3 runs every token once and every block's later slots.
    slots = tokens + blocks * (c.block_size - 2) if own else blocks * c.block_size
    kv = sum(p.numel() for n, p in network.named_parameters() if "k_proj" in n or "v_proj" in n) * (not own)
    fc = network.fc.weight.numel()
    body = sum(p.numel() for n, p in network.named_parameters() if not n.startswith(("fc.", "lm_head.")))
    of_target = sum(p.numel() for layer in run.target.layers for p in layer.parameters())
    heads = sum(p.shape[0] for n, p in network.named_parameters() if n.endswith("q_proj.weight"))  # of all layers
    keys = c.sequence_length + (0 if own else c.anchors * c.block_size)
    once = 1.0 if c.features == "online" else 1 / max(1.0, run.steps / run.batches.steps_per_epoch)
    return Cost(
        features=2 * tokens * of_target * once,
        layers=6 * (slots * body + c.rows * c.sequence_length * (fc + kv)),
        attention=12 * slots * keys * heads,
        head=(4 + 2 * own + 2 * (c.kl_weight > 0)) * blocks * (c.block_size - 1) * width * words,
    )


def _words(run: Run) -> int:
    """Rows of the head that the loss looks at."""
    if isinstance(run.network, Eagle3):
        return run.network.config.words
    return run.config.vocabulary or len(run.words.weight)


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
    blocks = min(blocks, round(run.steps * answer / per_epoch)) if c.drafter == "eagle3" else blocks
    features = Features(run.target, documents.train, d.taps, c.kl_weight > 0)
    one, rate = cost(run), speed(run.target.device, precision)
    words, layers = _words(run), d.backbone.num_hidden_layers
    seconds = one.total * run.steps / rate / 0.6  # what is not matrix products takes the rest
    kept = 0 if c.features == "online" else features.bytes()
    memory = 16 * parameters + run.words.weight.numel() * 4 + (kept if c.features == "memory" else 0)
    precise, of_target = (str(x).removeprefix("torch.") for x in (precision, run.target.dtype))
    weighing = f"D-PACE {c.dpace:g}" if c.dpace else f"exp(-(k-1)/{c.slot_decay:g})"
    told = {
        "target": [f"{run.target.name}, {len(run.target.layers)} layers of width {run.target.hidden_size}", of_target, device],
        "corpus": [f"{', '.join(c.corpus)}: {len(documents.train):,} conversations", f"{answer:,} answer tokens"],
        "": [f"{len(documents.held_out)} held out, {documents.cut} cut at {c.sequence_length}, {documents.dropped} without use"],
        "sources": [f"{source} {100 * count / answer:.0f} %" for source, count in documents.tokens.most_common()],
        "drafter": [
            c.drafter,
            f"{parameters:,} parameters",
            f"{2 * parameters / 1e6:.1f} MB in bfloat16",
            f"{layers} layer{'s' * (layers > 1)}",
        ],
        " ": [*_shape(run.network, c.block_size), f"first weights: {c.init}"],
        "batches": [
            f"{len(run.batches.packed):,} rows of {c.sequence_length} tokens",
            f"{c.rows} a step",
            f"{'at most ' * (c.drafter == 'eagle3')}{c.anchors} blocks each",
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


def _shape(network: DFlash | Eagle3, block_size: int) -> list[str]:
    if isinstance(network, Eagle3):
        return [f"{network.config.words:,} words", f"unrolled for {block_size - 1} steps", f"taps {list(network.config.taps)}"]
    return [f"block {block_size}, taps {list(network.config.taps)}", f"mask token {network.config.mask_token_id}"]
