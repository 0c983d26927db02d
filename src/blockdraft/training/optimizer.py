"""The optimiser: AdamW, or Muon for matrices and AdamW for the rest; one learning-rate curve for both."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from blockdraft.errors import UsageError
from blockdraft.training.config import TrainConfig


class Both(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser: one list of parameter groups, one state."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer):
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Give each part its groups, and the one state."""
        start = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start : start + count], self.state
            start += count


def make_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser of a config; each group knows its peak rate as ``peak``.

    Raises:
        UsageError: Muon with a torch that has none.
    """
    # A head has one row per word; Muon is for matrices between hidden states.
    matrices = [p for n, p in module.named_parameters() if p.dim() == 2 and not _head(n, config)]
    vectors = [p for n, p in module.named_parameters() if p.dim() != 2 or _head(n, config)]
    betas = (config.betas[0], config.betas[1])
    plain = {"params": vectors, "weight_decay": 0.0}
    if config.optimizer == "adamw":
        decayed = {"params": matrices, "weight_decay": config.weight_decay}
        # Fused: one pass over weights, gradients and moments; sharded weights have no such kernel on CPUs.
        fused = not any(isinstance(p, DTensor) for p in matrices)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([decayed, plain], lr=config.learning_rate, betas=betas, fused=fused)
    else:
        if not hasattr(torch.optim, "Muon"):
            raise UsageError(f"torch {torch.__version__} has no Muon; use optimizer=adamw, or torch 2.9 or later")
        muon = torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay)
        optimizer = Both(muon, torch.optim.AdamW([plain], lr=config.learning_rate, betas=betas))
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    return optimizer


def _head(name: str, config: TrainConfig) -> bool:
    return config.optimizer == "muon" and name.endswith("lm_head.weight")


def set_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, config: TrainConfig) -> float:
    """Set the rates of ``step`` (from 0) of ``steps``. Returns the share of the peak."""
    share = rate_share(step, steps, config)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share
    return share


def rate_share(step: int, steps: int, config: TrainConfig) -> float:
    """Linear warm-up; then a cosine to ``floor``, or a constant rate and a decay by ``1 - sqrt`` (arXiv 2405.18392, section 3)."""
    warmup = max(1, round(config.warmup * steps if config.warmup < 1 else config.warmup))
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "cosine":
        along = (step - warmup) / max(1, steps - warmup)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * along))
    falling = round(config.decay * steps)
    along = max(0, step + 1 - (steps - falling)) / max(1, falling)
    return config.floor + (1 - config.floor) * (1 - math.sqrt(along)) if along else 1.0
