"""DFlash: a network that fills all slots of a block in one forward pass (arXiv 2602.06036, section 4.1).

The features of the tapped target layers are fused once and injected into the keys and values of every layer (``injection.py``); the
block is the anchor and mask tokens; slot k predicts the token at its own position, anchor + k. Reference: z-lab/dflash 0.1.0,
``dflash/model.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.drafters.dflash2 import CandidateSelector, Convolution
from blockdraft.drafters.injection import Attention, KeyValues
from blockdraft.engine.attention import Mask

MOST_SLOTS = 4096  # of a block
FARTHEST = 2**31 - 1  # positions


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
