"""Small corpora, recipes and drafters for tests of training."""

from pathlib import Path
from typing import Any

import torch

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.blocks import Blocks, block_embeddings
from blockdraft.training.config import TrainConfig, read_config
from blockdraft.training.data.corpus import Corpus, Row, identity
from blockdraft.training.loss import LossRule, Words, block_loss
from tests import tiny
from tests.doubles import random_drafter

RECIPE = {
    "dtype": "float32",
    "precision": "float32",  # "auto" is what is fastest
    "device": "cpu",
    "init": "scratch",
    "layers": 2,
    "taps": [0, 1, 3],
    "mask_token_id": 5,
    "sequence_length": 64,
    "anchors": 12,
    "rows": 4,
    "held_out": 4,
    "learning_rate": 3e-3,
    "evaluate_every": 1000,
    "evaluate_prompts": 2,
    "evaluate_tokens": 16,
    "checkpoint_every": 1000,
}


EAGLE3_RECIPE = {key: value for key, value in RECIPE.items() if key not in ("layers", "mask_token_id")}
KINDS = ("dflash", "eagle3")


def answered(target: Target, prompt: list[int], tokens: int) -> list[int]:
    """The target's greedy answer."""
    request = Request(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True), target, detokenize=False)
    for _ in decode(target, None, [request]):
        pass
    return request.output


def make_corpus(folder: Path, target: Target, conversations: int = 20, tokens: int = 24, **settings: Any) -> Path:
    """A corpus of the target's answers to random prompts of unlike lengths."""
    corpus = Corpus(folder, identity(target, **{"temperature": 0.0, **settings}))
    for seed in range(conversations):
        prompt = tiny.prompt(4 + seed % 5, seed)
        corpus.add(Row(f"k{seed}", "ab"[seed % 2], prompt, answered(target, prompt, tokens), False))
    corpus.seal()
    return folder


def recipe(target: Path, corpus: Path, out: Path, **changes: Any) -> TrainConfig:
    usual = EAGLE3_RECIPE if changes.get("drafter") == "eagle3" else RECIPE
    values = {**usual, "target": str(target), "corpus": [str(corpus)], "out": str(out), **changes}
    return read_config(None, [f"{key}={'null' if value is None else value}" for key, value in values.items()])


def sequence_features(target: Target, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """Features ``[1, n, taps * hidden]`` of a whole sequence."""
    cache = target.new_cache(1, len(ids))
    return torch.cat([features for _, features in target.prefill(cache, 0, ids, taps)], dim=1).clone()


def block_logits(
    drafter: DFlashDrafter,
    features: torch.Tensor,
    ids: torch.Tensor,
    anchors: torch.Tensor,
    documents: torch.Tensor | None = None,
    block_size: int | None = None,
) -> torch.Tensor:
    """Training forward: draft logits ``[anchors, block, vocabulary]`` of all blocks at once; ``documents`` of one sequence."""
    width, length = block_size or drafter.config.block_size, features.shape[1]
    blocks = Blocks(drafter.network).eval()
    where = anchors[None], torch.arange(length)[None], (torch.zeros(length) if documents is None else documents).long()[None]
    embeddings = block_embeddings(drafter.network, drafter.embed, ids[None], anchors[None], width)
    return drafter.head(blocks(embeddings.to(drafter.dtype), features, *where, width))[0]


def train_tiny(target: Target, steps: int = 120) -> DFlashDrafter:
    """Overfit a small drafter to the target's own greedy continuations of a few prompts, without a run folder."""
    sequences = [[*prompt, *answered(target, prompt, 48)] for prompt in (tiny.prompt(6, seed) for seed in range(4))]
    drafter = random_drafter(target, seed=1)
    network = drafter.network.requires_grad_(True)
    blocks, width = Blocks(network).train(), drafter.block_size
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    prepared = [(torch.tensor(ids), sequence_features(target, ids, drafter.taps)) for ids in sequences]
    words = Words(target.head.weight.detach())
    with torch.enable_grad():
        for step in range(steps):
            ids, features = prepared[step % len(prepared)]
            anchors = torch.randint(6, len(ids) - width, (8,), generator=generator).sort().values
            embeddings = block_embeddings(network, target.embed, ids[None], anchors[None], width)
            positions = torch.arange(len(ids))[None]
            hidden = blocks(embeddings, features, anchors[None], positions, torch.zeros_like(positions), width)[0, :, 1:]
            labels = ids[anchors[:, None] + torch.arange(1, width)]
            total, weight, *_ = block_loss(hidden, labels, torch.ones_like(labels).bool(), None, words, LossRule())
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
    network.requires_grad_(False).eval()
    return drafter
