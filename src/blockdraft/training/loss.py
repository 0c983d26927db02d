"""The loss of drafted blocks: cross entropy and distillation over the vocabulary, in chunks, with its gradient at once.

The logits of all slots at a time would be the largest tensor of a training step by far. Here a chunk of blocks goes through the
frozen head, its loss and the gradient of its hidden states are computed, and its logits are gone before the next chunk. On CPUs a
kernel (``engine/loss.c``) does it in two calls while a chunk's logits are near; elsewhere autograd does the same.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.engine.kernels import LossRows, library

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # of one chunk's float32 logits


@dataclass(frozen=True)
class LossRule:
    """What a slot's prediction costs and how slots are weighed.

    Attributes:
        ce_weight, kl_weight: of cross entropy on the target's tokens, and of forward KL from the target's probabilities.
        kl_top_k: KL over the k most probable tokens and one class for the rest; 0: all tokens.
        decay: slot k weighs exp(-(k-1)/decay).
        dpace: smoothing of D-PACE weights (arXiv 2605.18810), which replace the decay; None: off.
        multiplier, softcap: what the drafter does to the head's logits.
    """

    ce_weight: float = 1.0
    kl_weight: float = 0.0
    kl_top_k: int = 0
    decay: float = 4.0
    dpace: float | None = None
    multiplier: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Words:
    """The rows of the head that a loss looks at.

    Attributes:
        weight: ``[words, hidden]``; the frozen head's, or some of its rows.
        bias: ``[words]`` or None.
        ids: ``[words]`` int64, the token of each row; None: all tokens in order.
        offset: ``[words]``, added to the logits: a word drawn from many speaks for all of them (log of how many); None: zero.
    """

    weight: Tensor
    bias: Tensor | None = None
    ids: Tensor | None = None
    offset: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Head logits ``[..., words]`` in float32, without the offset."""
        flat = hidden.reshape(-1, hidden.shape[-1])  # in three dimensions the gradient is a batch of small products, far slower
        return F.linear(flat.to(self.weight.dtype), self.weight, self.bias).float().view(*hidden.shape[:-1], -1)

    def some(self, ids: Tensor) -> "Words":
        """Those of all words that ascending ``ids`` name."""
        return Words(self.weight[ids], self.bias[ids] if self.bias is not None else None, ids)

    def index(self, tokens: Tensor) -> Tensor:
        """Rows of tokens that are among the words."""
        return tokens if self.ids is None else torch.searchsorted(self.ids, tokens)


def some_words(words: Words, labels: Tensor, frequent: Tensor, count: int, generator: torch.Generator) -> Words:
    """About ``count`` words: the labels, the most frequent tokens, and an eighth drawn from all the others.

    Args:
        words: the whole head.
        labels: int64, any shape.
        frequent: ``[tokens]`` int64, by falling frequency.
        generator: of the draw, on the CPU.
    """
    total = len(words.weight)
    drawn = count // 8
    kept = torch.cat([labels.flatten().unique(), frequent[: count - drawn]]).unique()
    others = torch.ones(total, dtype=torch.bool, device=kept.device)
    others[kept] = False
    rest = others.nonzero()[:, 0]
    sample = rest[torch.randperm(len(rest), generator=generator)[:drawn].to(rest.device)]
    ids = torch.cat([kept, sample]).sort().values
    offset = torch.zeros(len(ids), device=ids.device)
    if len(sample):
        offset[torch.searchsorted(ids, sample)] = math.log(len(rest) / len(sample))
    return replace(words.some(ids), offset=offset)


def choices(words: Words, teacher: Tensor) -> Tensor:
    """The teacher's most probable tokens ``[...]`` of its hidden states ``[..., hidden]``, over all words, in chunks."""
    flat = teacher.reshape(-1, teacher.shape[-1])
    size = max(1, CHUNK_BYTES.get(teacher.device.type, 1 << 28) // (4 * len(words.weight)))
    with torch.no_grad():
        best = [words.logits(part).max(dim=-1).indices for part in flat.split(size)]
    return torch.cat(best).view(teacher.shape[:-1])


def slot_weights(cross_entropy: Tensor, valid: Tensor, rule: LossRule) -> Tensor:
    """Weights ``[blocks, slots]`` without gradient; 0 where a slot is not valid.

    Decay: ``exp(-(k-1)/decay)`` (arXiv 2602.06036). D-PACE: with ``s = (1-a) exp(-CE) + a`` slot j weighs ``sum over m >= j of
    prod over i <= m of s_i``: how much it adds to the expected acceptance length.
    """
    if rule.dpace is None:
        slot = torch.arange(valid.shape[1], device=valid.device)
        return torch.exp(-slot / rule.decay) * valid
    survival = torch.where(valid, (1 - rule.dpace) * torch.exp(-cross_entropy.detach()) + rule.dpace, 1.0)
    reach = survival.cumprod(dim=1) * valid
    return reach.flip(1).cumsum(dim=1).flip(1) * valid


def distillation(draft: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """Forward KL ``[...]`` from the teacher's to the draft's distribution, both given as logits ``[..., words]``."""
    draft, teacher = draft.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    if top_k and top_k < draft.shape[-1]:
        teacher, kept = teacher.topk(top_k, dim=-1)
        draft = draft.gather(-1, kept)
        teacher, draft = _with_rest(teacher), _with_rest(draft)
    return (teacher.exp() * (teacher - draft)).sum(dim=-1)


def _with_rest(logarithms: Tensor) -> Tensor:
    """One more class: the mass that is missing to 1."""
    rest = torch.log1p(-logarithms.exp().sum(dim=-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([logarithms, rest], dim=-1)


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    valid: Tensor,
    teacher: Tensor | None,
    words: Words,
    rule: LossRule,
    theirs: Words | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of weighted slot losses, and what else the chunks told.

    Args:
        hidden: ``[blocks, slots, hidden]``.
        labels, valid: ``[blocks, slots]``, int64 tokens among the words, and bool.
        teacher: hidden states of the target, like ``hidden``; for distillation alone.
        words: the drafter's head.
        rule: what is summed.
        theirs: the target's head over the same words; None: the drafter's is the target's.

    Returns:
        The sum (scalar float32), the sum of weights (D-PACE: the count of blocks with a valid slot), cross entropy
        ``[blocks, slots]``, and whether each slot's best word is its label, bool. Gradients flow into ``hidden``, and into the head
        where it is trained.
    """
    return BlockLoss.apply(hidden, words.weight, labels, valid, teacher, words, theirs or words, rule)


class BlockLoss(torch.autograd.Function):
    """``block_loss``, with the head's weight as an input of its own: gradients flow into inputs alone."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, valid, teacher, words, theirs, rule):  # type: ignore[no-untyped-def]
        blocks, slots, _ = hidden.shape
        size = max(1, CHUNK_BYTES.get(hidden.device.type, 1 << 28) // (4 * slots * len(weight)))
        asked = ctx.needs_input_grad[:2]
        gradients = [torch.zeros_like(x) if on else None for x, on in zip((hidden, weight), asked, strict=True)]
        head = weight.detach().requires_grad_(asked[1])
        words = replace(words, weight=head)
        total = hidden.new_zeros((), dtype=torch.float32)
        counted = torch.zeros_like(total)
        entropies = torch.zeros(valid.shape, dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(valid)
        for start in range(0, blocks, size):
            part = slice(start, start + size)
            theirs_here = None if teacher is None else teacher[part]
            given = (hidden[part].detach(), labels[part], valid[part], theirs_here, words, theirs, rule)
            told = None if asked[1] else fused_loss(*given, wanted=asked[0])
            if told is None:
                with torch.set_grad_enabled(any(asked)):
                    told = chunk_loss(given[0].requires_grad_(asked[0]), *given[1:])
                asking = [x for x in (given[0], head) if x.requires_grad]
                found = iter(torch.autograd.grad(told.loss, asking)) if asking else iter(())
                told.gradient = next(found) if asked[0] else None
                if gradients[1] is not None:
                    gradients[1] += next(found)
            total += told.loss.detach()
            counted += told.counted
            entropies[part], correct[part] = told.entropy, told.correct
            if gradients[0] is not None and told.gradient is not None:
                gradients[0][part] = told.gradient
        ctx.gradients = gradients
        ctx.mark_non_differentiable(counted, entropies, correct)
        return total, counted, entropies, correct

    @staticmethod
    def backward(ctx, total, *others):  # type: ignore[no-untyped-def]
        scaled = (None if gradient is None else gradient * total.to(gradient.dtype) for gradient in ctx.gradients)
        return *scaled, None, None, None, None, None, None


@dataclass
class Told:
    """What a chunk of blocks told; as in ``block_loss``, and the gradient of its hidden states."""

    loss: Tensor
    counted: Tensor
    entropy: Tensor
    correct: Tensor
    gradient: Tensor | None = None


def chunk_loss(
    hidden: Tensor,
    labels: Tensor,
    valid: Tensor,
    teacher: Tensor | None,
    words: Words,
    theirs: Words,
    rule: LossRule,
) -> Told:
    """The loss of a few blocks at once, by autograd; arguments as in ``block_loss``."""
    logits = capped(words.logits(hidden), rule)
    index = words.index(labels)
    correct = (logits.detach().max(dim=-1).indices == index) & valid
    if words.offset is not None:
        logits = logits + words.offset
    entropy = F.cross_entropy(logits.flatten(0, 1), index.flatten(), reduction="none").view(valid.shape)
    cost = rule.ce_weight * entropy
    if rule.kl_weight:
        assert teacher is not None
        with torch.no_grad():
            wanted = theirs.logits(teacher)
            wanted = wanted if theirs.offset is None else wanted + theirs.offset
        cost = cost + rule.kl_weight * distillation(logits, wanted, rule.kl_top_k)
    weights = slot_weights(entropy, valid, rule)
    return Told(weighed(cost, weights, valid), count(weights, valid, rule), entropy.detach(), correct)


def fused_loss(
    hidden: Tensor,
    labels: Tensor,
    valid: Tensor,
    teacher: Tensor | None,
    words: Words,
    theirs: Words,
    rule: LossRule,
    wanted: bool = True,
) -> Told | None:
    """The same while the logits are near, where a kernel does it (CPUs; KL over all words, a frozen head); else None.

    By the logits the gradient of cross entropy is ``p - label``, that of forward KL ``p - q``.

    Args:
        wanted: the gradient too.
    """
    built = library() if hidden.device.type == "cpu" else None
    if built is None or rule.kl_top_k or theirs.offset is not words.offset:
        return None
    assert teacher is not None or not rule.kl_weight
    logits = capped(words.logits(hidden), rule).flatten(0, 1)
    bent = None if rule.softcap is None else 1 - (logits / rule.softcap).square()  # how much the cap lets through
    teaching = theirs.logits(teacher).flatten(0, 1) if teacher is not None and rule.kl_weight else None
    rows = LossRows(built, logits, teaching, words.offset, words.index(labels).flatten())
    entropy = rows.entropy.view(valid.shape)
    cost = rule.ce_weight * entropy + rule.kl_weight * rows.divergence.view(valid.shape)
    weights = slot_weights(entropy, valid, rule)
    told = Told(weighed(cost, weights, valid), count(weights, valid, rule), entropy, rows.right.view(valid.shape) & valid)
    if wanted:
        flat = weights.flatten()
        gradient = rows.gradients(rule.ce_weight * flat, rule.kl_weight * flat)
        gradient = gradient if bent is None else gradient * bent
        gradient = gradient.to(words.weight.dtype) @ words.weight
        told.gradient = (rule.multiplier * gradient).to(hidden.dtype).view(hidden.shape)
    return told


def capped(logits: Tensor, rule: LossRule) -> Tensor:
    """What the drafter does to the head's logits."""
    logits = logits if rule.multiplier == 1.0 else logits * rule.multiplier
    return logits if rule.softcap is None else torch.tanh(logits / rule.softcap) * rule.softcap


def weighed(cost: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    """The sum of slots' costs by their weights."""
    return (torch.where(valid, cost, 0.0) * weights).sum()


def count(weights: Tensor, valid: Tensor, rule: LossRule) -> Tensor:
    """What a batch's loss is divided by in the end: the sum of weights; with D-PACE, blocks that have a valid slot."""
    return weights.sum() if rule.dpace is None else valid.any(dim=1).sum().float()
