"""What a step tells: sums that add up over chunks, rows and processes, and the figures made of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.rules.sampling import double


@dataclass
class Sums:
    """Additive counts of drafted blocks.

    Attributes:
        values: ``[5 + 3 * slots]`` float64: loss, weight, blocks, those of them that showed nothing, and the tokens that these are
            estimated to bring; then per slot valid ones, right ones, and cross entropy.
    """

    values: Tensor

    @classmethod
    def of(
        cls, loss: Tensor, weight: Tensor, entropies: Tensor, correct: Tensor, valid: Tensor, shown: Tensor | None = None
    ) -> "Sums":
        """Sums of blocks ``[blocks, slots]``; only blocks with a valid slot count.

        Args:
            shown: slots whose token the drafter saw: not valid, and their block estimates nothing.
        """
        counted = valid.any(dim=1)
        bare = counted if shown is None else counted & ~shown.any(dim=1)
        # Multiplying mean accuracies would lose that slots of one block are right together: count every block's own prefix.
        emitted = (1 + (correct & valid).long().cumprod(dim=1).sum(dim=1)) * bare
        heads = torch.stack([double(x.detach()) for x in (loss, weight, counted.sum(), bare.sum(), emitted.sum())])
        slots = [double(x.sum(dim=0)) for x in (valid, correct & valid)]
        return cls(torch.cat([heads, *slots, (double(entropies) * double(valid)).sum(dim=0)]))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.values + other.values)

    @property
    def weight(self) -> float:
        return float(self.values[1])

    def figures(self) -> dict[str, Any]:
        """Loss per weight, acceptance length as the mean over blocks of ``1 + sum of prefixes``, accuracy per slot."""
        loss, weight, blocks, bare, emitted = self.values[:5].tolist()
        valid, right, entropy = (part.tolist() for part in self.values[5:].chunk(3))
        return {
            "loss": loss / weight if weight else None,
            "blocks": int(blocks),
            "estimated_tau": emitted / bare if bare else None,
            "first_slot": right[0] / valid[0] if valid[0] else None,
            "accuracy": [r / v if v else None for r, v in zip(right, valid, strict=True)],
            "cross_entropy": sum(entropy) / sum(valid) if sum(valid) else None,
        }
