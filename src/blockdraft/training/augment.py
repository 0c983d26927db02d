"""Against memorising: noise on what a drafter reads of its target, and blocks that show some of their tokens."""

import torch
from torch import Tensor

from blockdraft.training.batches import Batch, seed_of


def noisy(features: Tensor, batch: Batch, taps: int, share: float, seed: int) -> Tensor:
    """Features ``[rows, length, taps * hidden]`` with uniform noise of up to ``share`` standard deviations of each tap.

    A row's noise is a function of seed, epoch and row alone, and so is its scale: however a batch is split, it is the same.
    """
    out = torch.empty_like(features)
    for row, key in enumerate(batch.keys):
        split = features[row].float().unflatten(-1, (taps, -1))  # [length, taps, hidden]
        there = batch.documents[row] >= 0
        spread = split[there].std(dim=(0, 2), keepdim=True) if bool(there.any()) else split[:1, :, :1] * 0
        generator = torch.Generator(features.device).manual_seed(seed_of(seed, *key))
        noise = torch.rand(split.shape, generator=generator, device=features.device) * 2 - 1
        out[row] = (split + noise * spread * share).flatten(-2).to(features.dtype)
    return out


def revealed(batch: Batch, block_size: int, share: float, seed: int) -> Tensor:
    """Which slots of which blocks are shown, bool ``[rows, anchors, block - 1]``: none, or each with a chance of its block's own.

    A function of seed, epoch and row, like the noise.
    """
    rows = []
    for key in batch.keys:
        generator = torch.Generator().manual_seed(seed_of(seed, *key, 1))
        chosen, chance = torch.rand(2, batch.anchors.shape[1], 1, generator=generator)
        rows.append((chosen < share) & (torch.rand(batch.anchors.shape[1], block_size - 1, generator=generator) < chance))
    return torch.stack(rows).to(batch.ids.device)
