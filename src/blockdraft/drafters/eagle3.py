"""EAGLE-3: a one-layer drafter that writes its tokens one after the other, from features of three target layers and, further on,
from its own output (arXiv 2503.01840; SafeAILab/EAGLE ``cnets.py``).

At position t it reads the token at t + 1 and the target's features at t, and predicts the token at t + 2 over a reduced vocabulary
of its own. Behind the anchor there are no features: its own output takes their place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockdraft.drafters.base import Draw
from blockdraft.drafters.injection import KeyValues, rotate
from blockdraft.drafters.network import MLP
from blockdraft.drafters.shortlist import spread
from blockdraft.drafters.tree import best_nodes
from blockdraft.engine.attention import Mask, additive, attend, causal, visibility
from blockdraft.engine.cache import KVCache
from blockdraft.errors import UsageError
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import best

BLOCK_SIZE = 8  # the anchor and seven drafted tokens, as in the training-time test
DEPTH, TOP_K = 8, 10  # levels of a tree, and how many of each are gone on with (SafeAILab: depth 7 behind the first, top-k 10)
CHUNK = 512  # tokens of a prompt that are taken in at once


@dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 drafter is, independent of the file format it came from.

    Attributes:
        backbone: sizes, activation, norm epsilon and rope of its Llama-like layer.
        words: of its own vocabulary.
        vocabulary: of the target.
        taps: three target layers (0-based, their outputs), in the order of ``fc``'s input.
    """

    backbone: LlamaConfig
    words: int
    vocabulary: int
    taps: tuple[int, ...]


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """The inputs of layers 2, N // 2 and N - 3 (SafeAILab ``modeling_llama_kv.py``), which are the outputs of those before."""
    return 1, target_layers // 2 - 1, target_layers - 4


class Attention(nn.Module):
    """Llama attention whose queries, keys and values read two vectors side by side."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        size = c.head_dim or c.hidden_size // c.num_attention_heads
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads
        self.head_dim, self.scale = size, size**-0.5
        self.q_proj = nn.Linear(2 * c.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: KeyValues, mask: Mask) -> Tensor:
        query, key, value = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        keys, values = kv.update(rotate(key, *rope), value, 0)
        return self.o_proj(attend(rotate(query, *rope), keys, values, mask, self.scale).flatten(2))


class MidLayer(nn.Module):
    """The one layer: the residual runs along the features."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, fused: Tensor, rope: tuple[Tensor, Tensor], kv: KeyValues, mask: Mask) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(fused)], dim=-1)
        fused = fused + self.self_attn(both, rope, kv, mask)
        return fused + self.mlp(self.post_attention_layernorm(fused))


class Eagle3(nn.Module):
    """The drafter network; parameter names are those of SafeAILab's files. The target's embedding is borrowed."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        c = config.backbone
        self.config = config
        self.fc = nn.Linear(len(config.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = MidLayer(c)
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, config.words, bias=False)
        # Id in the target minus id here; and which of the target's words are here.
        self.register_buffer("d2t", torch.zeros(config.words, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocabulary) < config.words)
        self.rotary = LlamaRotaryEmbedding(c)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Eagle3":
        """Casts and moves never touch the rotary frequencies' precision."""
        super()._apply(fn, recurse)
        self.rotary = LlamaRotaryEmbedding(self.config.backbone).to(self.fc.weight.device)
        return self

    def linears(self) -> list[list[nn.Linear]]:
        """The linear layers in groups that always read the same tensor."""
        a, m = self.midlayer.self_attn, self.midlayer.mlp
        return [[self.fc], [a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj], [self.lm_head]]

    def words(self) -> Tensor:
        """``[words]`` int64: the target's id of each word."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def check(self, place: object) -> None:
        """Raise UsageError, which names ``place``, if the maps between the target's words and the own ones lead nowhere."""
        words, vocabulary = self.words(), self.config.vocabulary
        if int(words.min()) < 0 or int(words.max()) >= vocabulary or len(words.unique()) < len(words):
            raise UsageError(
                f"{place}: d2t maps the drafter's words to ids from {int(words.min())} to {int(words.max())}, the target has "
                f"different ids from 0 to {vocabulary - 1}"
            )
        if not torch.equal(self.t2d.nonzero()[:, 0], words.sort().values):
            raise UsageError(f"{place}: t2d and d2t disagree about which of the target's words the drafter has")

    def forward(self, embedded: Tensor, fused: Tensor, positions: Tensor, kv: KeyValues, mask: Mask) -> Tensor:
        """The output ``[rows, tokens, hidden]``, which is the next position's ``fused`` where there are no features.

        Args:
            embedded: ``[rows, tokens, hidden]`` embeddings of the tokens at the *next* positions.
            fused: ``[rows, tokens, hidden]`` fused features, or this network's own output, at the positions.
            positions: ``[rows, tokens]`` int64.
            kv: gives the layer what it attends over.
            mask: additive, or None: everything is seen.
        """
        return self.midlayer(embedded, fused, self.rotary(fused, positions), kv, mask)

    def logits(self, output: Tensor) -> Tensor:
        """``[..., words]``."""
        return self.lm_head(self.norm(output))


class Eagle3Drafter:
    """An EAGLE-3 network at work.

    Args:
        network: the drafter, in evaluation mode, on the target's device.
        embed: ids ``[...]`` -> the target's raw embedding rows ``[..., hidden]``.
        vocabulary: rows of the target's head.
        name: for results.
        packed_bytes: of the packed copies of its weights.
        candidates: of a tree; None: a chain.
    """

    def __init__(
        self,
        network: Eagle3,
        embed: Callable[[Tensor], Tensor],
        vocabulary: int,
        name: str = "eagle3",
        packed_bytes: int = 0,
        candidates: int | None = None,
    ):
        self.network, self.embed, self.name, self.packed_bytes = network.eval(), embed, name, packed_bytes
        self.config, self.vocabulary, self.candidates = network.config, vocabulary, candidates
        self.method = "eagle3" if candidates is None else "eagle3-tree"
        self.block_size = BLOCK_SIZE if candidates is None else DEPTH + 1
        self.taps = self.config.taps
        self.dtype, self.device = network.fc.weight.dtype, network.fc.weight.device
        self._words = network.words()
        self.forwards = 0

    def with_tree(self, candidates: int | None) -> "Eagle3Drafter":
        """The same network, drafting a tree of so many candidates; None: a chain."""
        return Eagle3Drafter(self.network, self.embed, self.vocabulary, self.name, self.packed_bytes, candidates)

    def room(self, block_size: int) -> int:
        return block_size if self.candidates is None else self.candidates + 1

    def reset(self, rows: int, capacity: int) -> None:
        drafted = BLOCK_SIZE if self.candidates is None else DEPTH * TOP_K
        self.cache = KVCache(rows, capacity + max(drafted, CHUNK), self.dtype, self.device)
        hidden = self.config.backbone.hidden_size
        self._fused = torch.zeros(rows, capacity, hidden, dtype=self.dtype, device=self.device)
        self._tokens = torch.zeros(rows, capacity + 1, dtype=torch.long, device=self.device)
        self._seen = [0] * rows  # tokens observed; the cache holds some of those whose next token was observed too

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        assert features is not None
        with torch.inference_mode():
            fused = self.network.fc(features[:, : max(counts)].to(self.dtype))
            for i, count in enumerate(counts, row):
                start = self._seen[i]
                self._fused[i, start : start + count] = fused[i - row, :count]
                self._tokens[i, start : start + count] = tokens[i - row, :count]
                self._seen[i] = start + count
                while self._seen[i] - 1 - self.cache.lengths[i] > BLOCK_SIZE:  # a prompt: all but its last token can be taken in
                    self._take(i, [min(CHUNK, self._seen[i] - 1 - self.cache.lengths[i])])

    def _take(self, first: int, counts: Sequence[int]) -> Tensor:
        """Run so many observed positions of the rows ``first, ...``; returns the last output of each row ``[rows, hidden]``."""
        rows, most = len(counts), max(counts)
        positions = self.cache.positions_behind(first, rows, most)
        row = torch.arange(first, first + rows, device=self.device)[:, None]
        inside = positions.clamp(max=self._fused.shape[1] - 1)  # padding of narrower rows
        embedded = self.embed(self._tokens[row, inside + 1]).to(self.dtype)
        span = self.cache.open(first, positions)
        mask = None if span.lone else additive(visibility(span, causal, self.device), self.cache.dtype)
        output = self.network(embedded, self._fused[row, inside], positions, self.cache, mask)
        self.cache.commit([range(count) for count in counts])
        self.forwards += 1
        return output[torch.arange(rows, device=self.device), torch.tensor(counts, device=self.device) - 1]

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        rows, steps = len(widths), max(widths) - 1
        if steps == 0:
            return Proposal(anchors.new_empty(rows, 0), list(widths))
        with torch.inference_mode():
            for i in range(rows):
                self._tokens[i, self._seen[i]] = anchors[i]
            output = self._take(0, [self._seen[i] - self.cache.lengths[i] for i in range(rows)])
            try:
                if self.candidates is None:
                    return self._chain(output, widths, draw)
                if draw is not None:
                    raise UsageError("a tree's candidates are chosen, not drawn, so the rejection rule has no law for them")
                return self._tree(output, widths, self.candidates)
            finally:  # what was drafted comes from own output, and the last token's successor is not certain yet: both go
                for i in range(rows):
                    self.cache.truncate(i, self._seen[i] - 1)

    def _chain(self, output: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        rows, steps = len(widths), max(widths) - 1
        logits: list[Tensor] = []
        tokens, laws = output.new_empty(rows, 0, dtype=torch.long), None
        for step in range(steps):
            logits.append(self.network.logits(output))
            if draw is None:
                tokens = torch.cat([tokens, self._words[best(logits[-1])][:, None]], dim=1)
            else:  # noise is keyed by position: earlier tokens are drawn again, the same
                tokens, laws = draw(spread(torch.stack(logits, dim=1), self._words, self.vocabulary))
            if step + 1 < steps:
                output = self._extend(tokens[:, step : step + 1], output[:, None], step, None)[:, 0]
        return Proposal(tokens, list(widths), probabilities=laws)

    def _extend(self, tokens: Tensor, fused: Tensor, depth: int, seen: Tensor | None) -> Tensor:
        """Run drafted tokens ``[rows, n]`` behind own output ``[rows, n, hidden]``, all at one depth; they stay in the cache.

        Args:
            seen: ``[rows, n, drafted]`` bool, which of all drafted entries each sees, itself included; None: a chain.
        """
        rows, count = tokens.shape
        starts = torch.tensor(self._seen[:rows], device=self.device)
        positions = (starts + depth)[:, None].expand(-1, count)
        span = self.cache.open(0, positions)
        mask = None if seen is None and span.lone else self._mask(starts, span.end, depth, seen)
        output = self.network(self.embed(tokens).to(self.dtype), fused, positions, self.cache, mask)
        self.cache.commit([range(count)] * rows)
        self.forwards += 1
        return output

    def _mask(self, starts: Tensor, end: int, depth: int, seen: Tensor | None) -> Tensor:
        place = torch.arange(end, device=self.device) - starts[:, None]  # among what was drafted; negative: observed
        if seen is None:
            return additive((place <= depth)[:, None, None], self.cache.dtype)
        inside = seen.gather(2, place.clamp(0, seen.shape[2] - 1)[:, None].expand(-1, seen.shape[1], -1))
        inside &= (place < seen.shape[2])[:, None]
        return additive((inside | (place < 0)[:, None])[:, None], self.cache.dtype)

    def _tree(self, output: Tensor, widths: Sequence[int], candidates: int) -> Proposal:
        """Level by level the most probable nodes are gone on with; of all that were seen the best stay (SafeAILab ``cnets.py``)."""
        rows, levels = len(widths), max(widths) - 1
        wide = min(TOP_K, candidates, self.config.words)
        logs = F.log_softmax(self.network.logits(output).float(), dim=-1)
        scores, places = logs.topk(wide, dim=-1)
        tokens = self._words[places]
        grown_levels = [(scores, tokens, torch.zeros_like(tokens))]
        node, above = torch.arange(1, wide + 1, device=self.device).expand(rows, -1), output[:, None].expand(-1, wide, -1)
        itself = torch.eye(wide, dtype=torch.bool, device=self.device).expand(rows, -1, -1)
        seen, known = itself, wide
        for depth in range(min(levels, DEPTH) - 1):
            out = self._extend(tokens, above, depth, seen)
            logs = F.log_softmax(self.network.logits(out).float(), dim=-1)
            grown, places = logs.topk(wide, dim=-1)
            grown = grown + scores[:, :, None]
            inside = torch.tensor([depth + 2 < width for width in widths], device=self.device)  # narrower rows end sooner
            grown = grown.masked_fill(~inside[:, None, None], float("-inf"))
            children = self._words[places].flatten(1)
            grown_levels.append((grown.flatten(1), children, node[:, :, None].expand(-1, -1, wide).flatten(1)))
            scores, chosen = grown.flatten(1).topk(wide, dim=-1)
            parent = chosen // wide
            tokens, node = children.gather(1, chosen), known + 1 + chosen
            above = out.gather(1, parent[:, :, None].expand(-1, -1, out.shape[-1]))
            seen = torch.cat([seen.gather(1, parent[:, :, None].expand(-1, -1, seen.shape[2])), itself], dim=2)
            known += wide * wide
        tokens, parents, scores = best_nodes(grown_levels, candidates)
        counts = (~scores.isneginf()).sum(dim=1).tolist()
        return Proposal(tokens[:, : max(counts)], [count + 1 for count in counts], parents[:, : max(counts)])

    def bytes(self) -> int:
        weights = sum(p.numel() * p.element_size() for p in [*self.network.parameters(), *self.network.buffers()])
        held = sum(t.numel() * t.element_size() for t in (self._fused, self._tokens))
        return weights + self.packed_bytes + held + self.cache.bytes()

    def truncate(self, row: int, length: int) -> None:
        self._seen[row] = length
        # The last one's next token may be another now.
        self.cache.truncate(row, min(self.cache.lengths[row], max(0, length - 1)))

    def move(self, source: int, target: int) -> None:
        length = self._seen[target] = self._seen[source]
        for held in (self._fused, self._tokens):
            held[target, :length] = held[source, :length]
        self.cache.move(source, target)
