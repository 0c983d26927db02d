"""DFlash: a block-diffusion drafter that fills all slots of a block in one forward pass (arXiv 2602.06036, section 4.1).

The features of the tapped target layers are fused once and injected into the keys and values of every layer; the block is
the anchor and mask tokens; slot k predicts the token at its own position, anchor + k. Reference: z-lab/dflash 0.1.0,
``dflash/model.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.drafters.base import Draw
from blockdraft.drafters.dflash2 import CandidateSelector, Convolution
from blockdraft.drafters.shortlist import Shortlist
from blockdraft.engine.attention import Mask, additive, attend, visibility
from blockdraft.engine.cache import KVCache, Span
from blockdraft.engine.memory import placed
from blockdraft.engine.plain import PlainLayer, PlainLayers, fits, plain_layer
from blockdraft.engine.recorded import Recorder
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import best

MOST_SLOTS = 4096  # of a block
FARTHEST = 2**31 - 1  # positions
UNREAD = 32  # tokens of every row that are taken in at a time, unless they are a prompt's
MOST_UNREAD = 256  # tokens of a row whose features may wait for a draft


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash drafter is, independent of the file format it came from.

    Attributes:
        backbone: sizes, activation, norm epsilon and rope of the Qwen3-like layers.
        block_size: slots of a block, the anchor included.
        mask_token_id: the row of the target's embedding that fills the empty slots.
        taps: target layers (0-based, their outputs), in the order of ``fc``'s input.
        target_layers: depth of the target it was trained for.
        causal: per layer, whether a slot sees only slots up to itself.
        windows: per layer, how many positions back (and, when not causal, forward) are seen; None: all.
        embedding_scale: multiplies the borrowed embedding rows.
        output_multiplier: multiplies the borrowed head's logits.
        softcap: ``s * tanh(logits / s)``, or None.
        convolution: taps and channels per group of DFlash 2's convolutions around attention and MLP; None: a DFlash.
        selector: rank and candidates per slot of DFlash 2's selector; None: a DFlash.
    """

    backbone: Qwen3Config
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    target_layers: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    convolution: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Whatever file it came from, a number that nothing can be drafted with is a ValueError that names it."""
        if not 2 <= self.block_size <= MOST_SLOTS:
            raise ValueError(f"block_size is {self.block_size}; it must be from 2, an anchor and a slot, to {MOST_SLOTS}")
        for window in self.windows:
            if window is not None and not (isinstance(window, int) and 1 <= window <= FARTHEST):
                raise ValueError(f"sliding_window is {window!r}; it must be a whole number from 1 to {FARTHEST}")
        if not 1 <= self.backbone.max_position_embeddings <= FARTHEST:
            found = self.backbone.max_position_embeddings
            raise ValueError(f"max_position_embeddings is {found}; it must be from 1 to {FARTHEST}")
        for name in ("embedding_scale", "output_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}, not a positive number")


class KeyValues(Protocol):
    """Where a layer's new keys and values go and what it attends over: a KVCache in decoding, a concatenation in training."""

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]: ...


class Attention(nn.Module):
    """Qwen3 attention whose context keys and values come from the target's features."""

    def __init__(self, c: Qwen3Config):
        super().__init__()
        size: int = c.head_dim
        heads, kv_heads, bias = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads, c.attention_bias
        self.head_dim, self.scale = size, size**-0.5
        self.q_proj = nn.Linear(c.hidden_size, heads * size, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=c.rms_norm_eps)

    def heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_dim)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, kv heads, tokens, head size]`` of features or block rows: the same matrices serve both."""
        keys = rotate(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), *rope)
        return keys, self.heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: KeyValues, layer: int, mask: Mask) -> Tensor:
        query = rotate(self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2), *rope)
        keys, values = kv.update(*self.keys_values(x, rope), layer)
        return self.o_proj(attend(query, keys, values, mask, self.scale).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Qwen3Config | LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.act = ACT2FN[c.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The Qwen3 layer; in DFlash 2 with a convolution before and behind each half."""

    def __init__(self, c: Qwen3Config, convolution: tuple[int, int] | None = None):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

        if convolution is not None:
            self.attention_conv, self.mlp_conv = (Convolution(c.hidden_size, *convolution) for _ in range(2))
        self.convolved = convolution is not None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], kv: KeyValues, layer: int, mask: Mask, width: int | None = None
    ) -> Tensor:
        inner = self.input_layernorm(x)
        if not self.convolved:
            x = x + self.self_attn(inner, rope, kv, layer, mask)
            return x + self.mlp(self.post_attention_layernorm(x))
        before, behind = self.attention_conv(inner, width)
        x = x + behind(self.self_attn(before, rope, kv, layer, mask))
        before, behind = self.mlp_conv(self.post_attention_layernorm(x), width)
        return x + behind(self.mlp(before))


class DFlash(nn.Module):
    """The drafter network; parameter names are those of z-lab's files. Training and decoding run the same ``forward``."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        c = config.backbone
        self.config = config
        self.layers = nn.ModuleList([Layer(c, config.convolution) for _ in range(c.num_hidden_layers)])
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.fc = nn.Linear(len(config.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(c)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(c.hidden_size, c.vocab_size, *config.selector)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DFlash":
        """Casts and moves never touch the rotary frequencies' precision: rounded to bfloat16 they are off by radians a few hundred
        positions on."""
        super()._apply(fn, recurse)
        self.rotary = Qwen3RotaryEmbedding(self.config.backbone).to(self.fc.weight.device)
        return self

    def linears(self) -> list[list[nn.Linear]]:
        """The linear layers in groups that always read the same tensor; only block rows have queries."""
        groups = [[self.fc]]
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            groups += [[attention.q_proj], [attention.k_proj, attention.v_proj], [attention.o_proj]]  # type: ignore[union-attr, list-item]
            groups += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]  # type: ignore[union-attr, list-item]
            if self.config.convolution is not None:
                groups += [[layer.attention_conv.kernel_projection], [layer.mlp_conv.kernel_projection]]  # type: ignore[union-attr, list-item]
        return groups

    def fuse(self, features: Tensor) -> Tensor:
        """The tapped outputs side by side, ``[rows, tokens, taps * hidden]``, as one vector ``[rows, tokens, hidden]``."""
        return self.hidden_norm(self.fc(features))

    def inject(self, fused: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Context keys and values of every layer.

        Args:
            fused: ``[rows, tokens, hidden]``.
            positions: ``[rows, tokens]`` int64.

        Returns:
            Per layer, keys and values ``[rows, kv heads, tokens, head size]``.
        """
        rope = self.rotary(fused, positions)
        return [layer.self_attn.keys_values(fused, rope) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(self, block: Tensor, positions: Tensor, kv: KeyValues, masks: Sequence[Mask], width: int | None = None) -> Tensor:
        """Hidden states ``[rows, slots, hidden]`` after the final norm.

        Args:
            block: ``[rows, slots, hidden]`` embeddings of anchor and mask tokens.
            positions: ``[rows, slots]`` int64.
            kv: gives each layer what it attends over: the context, then the block rows.
            masks: per layer, additive ``[rows, 1, slots, keys]``, a BlockMask, or None: everything is seen.
            width: slots of a block, where several stand side by side; None: it is one.
        """
        rope = self.rotary(block, positions)
        for index, layer in enumerate(self.layers):
            block = layer(block, rope, kv, index, masks[index], width)
        return self.norm(block)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in halves (NeoX layout) of ``[rows, heads, tokens, head size]``."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def visible_rule(causal: bool, window: int | None) -> Callable[..., Tensor]:
    """Which key position a slot sees, on absolute positions (method.md 1.2; z-lab ``_attention_mask``)."""

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) if causal else torch.ones_like(key <= query)
        if window is not None:
            seen = seen & (query - key < window)
            if not causal:
                seen = seen & (key - query < window)
        return seen

    return rule


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

    def reset(self, rows: int, capacity: int) -> None:
        capacity += UNREAD
        before: KVCache | None = getattr(self, "cache", None)
        if before is not None and before.recordings and before.rows == rows and before.capacity >= capacity:
            before.reuse()
        else:
            self.cache = KVCache(rows, capacity, self.dtype, self.device)
        self._unread: list[list[Tensor]] = [[] for _ in range(rows)]  # per row, features that no draft has needed yet
        self._waiting = [0] * rows  # tokens of them

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        """Features of a few tokens wait until a draft needs them: where drafting rests, they are hardly ever read."""
        assert features is not None
        rows = range(row, row + len(counts))
        if max(counts) > UNREAD and not any(self._waiting[i] for i in rows):
            self._inject(row, features, counts)
            return
        for i, found, count in zip(rows, features, counts, strict=True):
            self._unread[i].append(found[:count])
            self._waiting[i] += count
        if max(self._waiting) > MOST_UNREAD:
            self._read(self.cache.rows)

    def _read(self, rows: int) -> None:
        """Take in the features of the first rows that wait, a few tokens of every row at a time."""
        none = self.network.fc.weight.new_empty(0, self.network.fc.in_features)
        waiting = [torch.cat(parts) if parts else none for parts in self._unread[:rows]]
        self._unread[:rows], self._waiting[:rows] = [[] for _ in range(rows)], [0] * rows
        for start in range(0, max(map(len, waiting)), UNREAD):
            pieces = [features[start : start + UNREAD].to(self.dtype) for features in waiting]
            padded = pieces[0][None] if rows == 1 else nn.utils.rnn.pad_sequence(pieces, batch_first=True)
            self._inject(0, padded, [len(piece) for piece in pieces])

    def _inject(self, row: int, features: Tensor, counts: Sequence[int]) -> None:
        """Context keys and values of the rows ``row, row + 1, ...``; features ``[rows, most, taps * hidden]``."""
        with torch.inference_mode():
            features = features[:, : max(counts)].to(self.dtype)
            few = self.recorder.on and row == 0 and max(counts) <= UNREAD
            if not (few and self._play_inject(features)):
                span = self.cache.open(row, self.cache.positions_behind(row, *features.shape[:2]))
                fused = self.network.fuse(features)
                if self._plain is not None:
                    self._plain.inject(fused, self.network.rotary(fused.float(), span.positions), self.cache, span)
                else:
                    for layer, (keys, values) in enumerate(self.network.inject(fused, span.positions)):
                        self.cache.update(keys, values, layer)
        self.cache.commit([range(count) for count in counts])

    def _play_inject(self, features: Tensor) -> bool:
        """The same as a recorded pass of the first rows, if there is one."""
        cache = self.cache
        padded = cache.open_padded(cache.positions_behind(0, *features.shape[:2]))
        if padded is None:
            return False
        assert padded.slots is not None
        rows, count = padded.slots.shape
        widened = F.pad(features, (0, 0, 0, count - features.shape[1], 0, rows - features.shape[0]))

        def run(features: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            with cache.aimed(Span(0, [0] * rows, count, positions, None, slots)):
                for layer, (keys, values) in enumerate(self.network.inject(self.network.fuse(features), positions)):
                    cache.update(keys, values, layer)
            return ()

        inputs = (widened, padded.positions, padded.slots)
        return self.recorder.play(cache, ("inject", rows, count), inputs, run) is not None

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
            self._read(len(anchors))
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
        self._read(len(anchors))
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
        waiting = sum(features.numel() * features.element_size() for parts in self._unread for features in parts)
        return weights + self.packed_bytes + words + self.cache.bytes() + waiting

    def truncate(self, row: int, length: int) -> None:
        kept = self.cache.lengths[row]
        if self._waiting[row]:
            left = torch.cat(self._unread[row])[: max(0, length - kept)]
            self._unread[row], self._waiting[row] = [left], len(left)
        self.cache.truncate(row, min(kept, length))

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self._unread[target], self._waiting[target] = list(self._unread[source]), self._waiting[source]
