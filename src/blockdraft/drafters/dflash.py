"""DFlashDrafter: a DFlash network at work, one forward pass for all slots of a block (arXiv 2602.06036, section 4.1).

``context.py`` holds what it knows of each row, ``network.py`` what it computes. Reference: z-lab/dflash 0.1.0, ``dflash/model.py``.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.drafters.base import Draw
from blockdraft.drafters.context import Context
from blockdraft.drafters.injection import visible_rule
from blockdraft.drafters.network import DFlash, Layer
from blockdraft.drafters.shortlist import Shortlist
from blockdraft.engine.attention import additive, visibility
from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.memory import placed
from blockdraft.engine.plain import PlainLayer, PlainLayers, fits, plain_layer
from blockdraft.engine.recorded import Recorder
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import best


class DFlashDrafter:
    """A DFlash network at work: projected context keys and values per row, and one forward pass per proposal.

    Args:
        network: the drafter, in evaluation mode, on the target's device.
        embed: ids ``[...]`` -> the target's raw embedding rows ``[..., hidden]``.
        head: hidden ``[..., hidden]`` -> logits ``[..., vocabulary]``, the target's own.
        name: for results.
        packed_bytes: of the packed copies of its weights.
        shortlist: the words to draft from; None: all.
        denoising_steps: forward passes over a block: after each the most certain slots are kept, and the others are filled anew,
            knowing these. A drafter must have been trained for more than one (``revealed`` in its recipe).

    Raises:
        UsageError: more steps than a block has slots to fill, or for a DFlash 2.
    """

    def __init__(
        self,
        network: DFlash,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        name: str = "dflash",
        packed_bytes: int = 0,
        shortlist: Shortlist | None = None,
        denoising_steps: int = 1,
    ):
        slots = network.config.block_size - 1
        if not 1 <= denoising_steps <= max(1, slots):
            raise UsageError(f"denoising steps are {denoising_steps}; they must be from 1 to {slots}, the slots that are filled")
        if denoising_steps > 1 and network.config.selector is not None:
            raise UsageError("a DFlash 2 fills its slots one after the other: it has one denoising step")
        self.denoising_steps = denoising_steps
        self.method = "dflash" if denoising_steps == 1 else f"dflash:{denoising_steps}"
        self.network = network.eval()
        self.config = network.config
        self.embed, self.head, self.name = embed, head, name
        self.block_size, self.taps = self.config.block_size, self.config.taps
        weight = network.fc.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.packed_bytes, self.shortlist, self.forwards = packed_bytes, shortlist, 0
        self._plain = self._plain_layers() if packed_bytes else None
        # A convolution reads its neighbours' slots, and a selector goes from word to word: a DFlash 2 is not padded.
        recorded = self.config.convolution is None and self.config.selector is None
        self.recorder = Recorder(name, self.device if recorded else torch.device("cpu"))
        self.context = Context(self.network, self._plain, self.recorder)

    def _plain_layers(self) -> PlainLayers | None:
        """The layers as one call: where they are packed for our own kernel, and see alike."""
        c = self.config.backbone
        alike = len(set(zip(self.config.causal, self.config.windows, strict=True))) == 1
        layers = []
        for layer in cast(list[Layer], list(self.network.layers)):
            a, m = layer.self_attn, layer.mlp
            groups = [[a.q_proj], [a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj]]
            norms = [layer.input_layernorm, a.q_norm, a.k_norm, layer.post_attention_layernorm]
            layers.append(plain_layer(groups, norms, c.head_dim))
        found, heads = cast(list[PlainLayer], layers), c.num_attention_heads
        if self.config.convolution or not alike or None in layers or c.hidden_act != "silu" or not fits(found, heads, c.head_dim):
            return None
        return PlainLayers(found, heads, c.head_dim, c.rms_norm_eps)

    def with_denoising(self, steps: int) -> "DFlashDrafter":
        """The same network, filling a block in so many passes.

        Raises:
            UsageError: more steps than a block has slots to fill, or for a DFlash 2.
        """
        return DFlashDrafter(self.network, self.embed, self.head, self.name, self.packed_bytes, self.shortlist, steps)

    def room(self, block_size: int) -> int:
        return block_size

    @property
    def cache(self) -> KVCache:
        """The context's keys and values."""
        return self.context.cache

    def reset(self, rows: int, capacity: int) -> None:
        self.context.reset(rows, capacity)

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        assert features is not None
        self.context.observe(row, features, counts)

    def truncate(self, row: int, length: int) -> None:
        self.context.truncate(row, length)

    def move(self, source: int, target: int) -> None:
        self.context.move(source, target)

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        slots = max(widths)
        if slots == 1:
            return Proposal(anchors.new_empty(len(anchors), 0), list(widths))
        with torch.inference_mode():
            if self.config.selector is not None:
                return self._select(anchors, widths, draw)
            if self.denoising_steps > 1:
                return self._denoise(anchors, widths, draw)
            logits = self.logits(anchors, widths)
            if draw is None:
                return Proposal(self._words(best(logits)), list(widths))
            tokens, probabilities = draw(self.shortlist.spread(logits) if self.shortlist is not None else logits)
            return Proposal(tokens, list(widths), probabilities=probabilities)

    def _denoise(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        """Several passes; after pass s of S, the most certain ``slots * s / S`` slots of a row stay as they are."""
        slots = max(widths) - 1
        steps = min(self.denoising_steps, slots)
        known = anchors.new_full((len(anchors), slots), self.config.mask_token_id)
        kept = torch.zeros_like(known, dtype=torch.bool)
        for step in range(1, steps + 1):
            logits = self.logits(anchors, widths, known)
            if draw is None:
                tokens = self._words(best(logits))
            else:
                tokens, laws = draw(self.shortlist.spread(logits) if self.shortlist is not None else logits)
                logits = laws.log()
            sure = logits.float().log_softmax(dim=-1).amax(dim=-1).masked_fill(kept, float("inf"))
            known = torch.where(kept, known, tokens)
            kept = torch.zeros_like(kept).scatter_(1, sure.topk(slots * step // steps, dim=-1).indices, True)
            filled = known
            known = known.masked_fill(~kept, self.config.mask_token_id)
        return Proposal(filled, list(widths))

    def _select(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        """DFlash 2: slot by slot, each among its candidates, given the word before."""
        selector, hidden = self.network.candidate_selector, self._hidden(anchors, widths)
        logits, places = self._logits(hidden).topk(selector.candidates, dim=-1)
        words, projected = self._words(places), selector.hidden_projection(hidden)
        tokens, laws, scores = anchors.new_empty(len(anchors), 0), None, []
        for slot in range(hidden.shape[1]):
            before = anchors if slot == 0 else tokens[:, -1]
            scores.append(selector.scores(logits[:, slot], words[:, slot], projected[:, slot], before))
            if draw is None:
                chosen = words[:, slot].gather(1, best(scores[-1])[:, None])
                tokens = torch.cat([tokens, chosen], dim=1)
            else:  # noise is keyed by position: earlier tokens are drawn again, the same
                over = logits.new_full((len(anchors), slot + 1, self.config.backbone.vocab_size), float("-inf"))
                tokens, laws = draw(over.scatter_(2, words[:, : slot + 1], torch.stack(scores, dim=1)))
        return Proposal(tokens, list(widths), probabilities=laws)

    def likely(self, anchors: Tensor, widths: Sequence[int], most: int) -> tuple[Tensor, Tensor]:
        """The ``most`` likely words of the slots behind the anchor: log-probabilities and ids ``[rows, slots - 1, most]``, best
        first; minus infinity beyond a row's width."""
        with torch.inference_mode():
            logits = self.logits(anchors, widths).float()
            values, words = logits.topk(min(most, logits.shape[-1]), dim=-1)
            logs = values - logits.logsumexp(dim=-1, keepdim=True)
            if len(set(widths)) > 1:
                inside = torch.arange(1, max(widths), device=self.device) < placed(widths, self.device)[:, None]
                logs = logs.masked_fill(~inside[..., None], float("-inf"))
            return logs, self._words(words)

    def _words(self, places: Tensor) -> Tensor:
        """Ids of the words at these places of the logits."""
        return places if self.shortlist is None else self.shortlist.ids[places]

    def logits(self, anchors: Tensor, widths: Sequence[int], known: Tensor | None = None) -> Tensor:
        """Draft logits ``[rows, slots - 1, words]`` of the slots behind the anchor, over the shortlist if there is one.

        Args:
            known: ``[rows, slots - 1]`` their tokens, where they are not masks alone.
        """
        if self.recorder.on:
            self.context.read(len(anchors))
            logits = self._play_block(*self._block(anchors, widths, known))
            if logits is not None:
                return logits
        return self._logits(self._hidden(anchors, widths, known))

    def _play_block(self, ids: Tensor, real: Tensor | None) -> Tensor | None:
        """The logits of a block by a recorded pass, if there is one."""
        cache, (rows, count) = self.cache, ids.shape
        among = real if real is not None else torch.ones(rows, count, count, dtype=torch.bool, device=self.device)
        padded = cache.open_padded(cache.positions_behind(0, rows, count), among)
        if padded is None:
            return None
        assert padded.slots is not None
        rules = list(zip(self.config.causal, self.config.windows, strict=True))
        kinds = sorted(set(rules), key=rules.index)
        masks = [additive(visibility(padded, visible_rule(*kind), self.device), cache.dtype) for kind in kinds]
        widened = F.pad(ids, (0, padded.count - count, 0, len(padded.starts) - rows), value=self.config.mask_token_id)

        def run(ids: Tensor, positions: Tensor, slots: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
            with cache.aimed(Span(0, [0] * len(ids), ids.shape[1], positions, None, slots, padded.extent)):
                block = self.embed(ids).to(self.dtype) * self.config.embedding_scale
                hidden = self.network(block, positions, cache, [masks[kinds.index(rule)] for rule in rules])
                return (self._logits(hidden[:, 1:]),)

        key = ("block", *padded.slots.shape, padded.extent)
        found = self.recorder.play(cache, key, (widened, padded.positions, padded.slots, *masks), run)
        if found is None:
            return None
        self.forwards += 1
        return found[0][:rows, : count - 1]

    def _block(self, anchors: Tensor, widths: Sequence[int], known: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Ids ``[rows, slots]`` of the blocks; and who sees whom ``[rows, slots, slots]``, where rows are of unequal width.

        Padding slots of narrower rows are hidden by the same rule as the padding nodes of a proposal.
        """
        slots = max(widths)
        ids = anchors.new_full((len(anchors), slots), self.config.mask_token_id)
        ids[:, 0] = anchors
        if known is not None:
            ids[:, 1:] = known
        if len(set(widths)) == 1:
            return ids, None
        inside = torch.arange(slots, device=self.device) < placed(widths, self.device)[:, None]
        return ids, inside[:, None, :].expand(-1, slots, -1) | torch.eye(slots, dtype=torch.bool, device=self.device)

    def _hidden(self, anchors: Tensor, widths: Sequence[int], known: Tensor | None = None) -> Tensor:
        """Hidden states ``[rows, slots - 1, hidden]`` of the slots behind the anchor; ``known``: their tokens, not masks alone."""
        self.forwards += 1
        self.context.read(len(anchors))
        ids, real = self._block(anchors, widths, known)
        block = self.embed(ids).to(self.dtype) * self.config.embedding_scale
        span = self.cache.open(0, self.cache.positions_behind(0, *ids.shape), real)
        if self._plain is not None:
            rope = self.network.rotary(block.float(), span.positions)
            mask = None if self._sees_all(span) else self._masks(span)[0]
            hidden = self.network.norm(self._plain.run(block, rope, self.cache, span, mask)[0].to(self.dtype))
        else:
            hidden = self.network(block, span.positions, self.cache, self._masks(span))
        return hidden[:, 1:]  # slot 0 is the anchor: it is known

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden) if self.shortlist is None else self.shortlist.logits(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def _sees_all(self, span: Span) -> bool:
        """Whether every slot sees all of its row's keys."""
        return set(self.config.causal) == {False} and set(self.config.windows) == {None} and span.visible is None

    def _masks(self, span: Span) -> list[Tensor | None]:
        made: dict[tuple[bool, int | None], Tensor | None] = {}
        for rule in zip(self.config.causal, self.config.windows, strict=True):
            if rule not in made:
                everything = rule == (False, None) and span.slots is None and span.visible is None
                made[rule] = None if everything else additive(visibility(span, visible_rule(*rule), self.device), self.cache.dtype)
        return [made[rule] for rule in zip(self.config.causal, self.config.windows, strict=True)]

    def bytes(self) -> int:
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.network.parameters())
        words = self.shortlist.bytes if self.shortlist is not None else 0
        return weights + self.packed_bytes + words + self.cache.bytes() + self.context.waiting_bytes
