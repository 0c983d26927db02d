"""A few seconds of DFlash training: enough for a tiny drafter that is sometimes right. The real trainer is not this."""

import torch
import torch.nn.functional as F

from blockdraft.attention import additive
from blockdraft.decode import decode
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.request import Request
from blockdraft.sampling import SamplingParams
from blockdraft.target import Target
from blockdraft.training.mask import Concatenation, block_positions, block_visibility
from tests import tiny
from tests.doubles import random_drafter


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
    """Training forward: draft logits ``[anchors, block, vocabulary]`` of all blocks at once."""
    config, network = drafter.config, drafter.network
    width = block_size or config.block_size
    block_ids = torch.full((len(anchors), width), config.mask_token_id)
    block_ids[:, 0] = ids[anchors]
    block = (drafter.embed(block_ids.view(1, -1)) * config.embedding_scale).to(drafter.dtype)
    context = network.inject(features, torch.arange(features.shape[1])[None])
    masks = [
        additive(block_visibility(anchors, width, features.shape[1], causal, window, documents)[None, None], drafter.dtype)
        for causal, window in zip(config.causal, config.windows, strict=True)
    ]
    hidden = network(block, block_positions(anchors, width), Concatenation(context), masks)
    return drafter.head(hidden).view(len(anchors), width, -1)


def train_tiny(target: Target, steps: int = 120) -> DFlashDrafter:
    """Overfit a small drafter to the target's own greedy continuations of a few prompts."""
    sequences = []
    for seed in range(4):
        request = Request(tiny.prompt(6, seed), SamplingParams(max_new_tokens=48, ignore_eos=True), target)
        for _ in decode(target, None, [request]):
            pass
        sequences.append(request.ids)
    drafter = random_drafter(target, seed=1)
    network = drafter.network.requires_grad_(True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    prepared = [(torch.tensor(ids), sequence_features(target, ids, drafter.taps)) for ids in sequences]
    width = drafter.block_size
    with torch.enable_grad():
        for step in range(steps):
            ids, features = prepared[step % len(prepared)]
            anchors = torch.randint(6, len(ids) - width, (8,), generator=generator)
            logits = block_logits(drafter, features, ids, anchors)[:, 1:]
            labels = ids[anchors[:, None] + torch.arange(1, width)]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False).eval()
    return drafter
