"""A drafter as transformers' own assisted generation wants it (transformers >= 5.15, ``DFlashTokenCandidateGenerator``).

>>> model.generate(ids, assistant_model=AssistantDrafter(drafter, model), speculation_type="dflash")  # doctest: +SKIP
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.injection import visible_rule
from blockdraft.engine.attention import Mask, additive
from blockdraft.errors import UsageError


class AssistantDrafter(nn.Module):
    """Wraps a loaded DFlash drafter; the same network computes.

    Args:
        drafter: from ``load_drafter``.
        model: the transformers target that will call ``generate``.

    Attributes:
        config: what the candidate generator reads: ``block_size``, ``mask_token_id``, ``target_layer_ids``, and what its cache is
            built from.
        held: keys and values of its cache at the last draft.
    """

    def __init__(self, drafter: DFlashDrafter, model: PreTrainedModel):
        super().__init__()
        if drafter.config.selector is not None:
            raise UsageError("transformers drafts every slot by itself; a DFlash 2 picks each word after the one before")
        self.network, self.drafter_config = drafter.network, drafter.config
        self.held: list[Tensor] = []
        config = drafter.config.backbone.__class__.from_dict(drafter.config.backbone.to_dict())
        config.block_size, config.mask_token_id = drafter.block_size, drafter.config.mask_token_id
        config.target_layer_ids = list(drafter.taps)
        # The generator crops its cache by itself, and our masks do the sliding: its layers must keep everything.
        config.layer_types, config.sliding_window = ["full_attention"] * config.num_hidden_layers, None
        self.config = config
        # transformers hands over the output of the embedding module, which some models scale; drafters read raw rows.
        embedding = cast(nn.Embedding, model.get_input_embeddings())
        ids = torch.arange(8, device=embedding.weight.device)
        with torch.inference_mode():
            scale = float(embedding(ids).float().norm() / embedding.weight[ids].float().norm())
        self.scale = drafter.config.embedding_scale / scale

    @property
    def device(self) -> torch.device:
        return self.network.fc.weight.device

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
    ) -> SimpleNamespace:
        """One draft: ``noise_embeds [1, block, hidden]``, ``context_hidden_states [1, tokens, taps * hidden]`` of the tokens since
        the last call, ``position_ids [1, tokens + block]``. Returns ``last_hidden_state [1, block, hidden]``.

        Versions before 5.20 say ``past_key_values`` for ``cache``. One row is never padded, so ``attention_mask`` is all ones.
        """
        cache = cache if cache is not None else past_key_values
        assert cache is not None
        tokens, dtype = context_hidden_states.shape[1], self.network.fc.weight.dtype
        with torch.inference_mode():
            fused = self.network.fuse(context_hidden_states.to(dtype))
            context = self.network.inject(fused, position_ids[:, :tokens])
            block = noise_embeds.to(dtype) * self.scale
            positions = position_ids[:, tokens:]
            behind = _Behind(context, cache)
            hidden = self.network(block, positions, behind, self._masks(positions))
        self.held = behind.held
        return SimpleNamespace(last_hidden_state=hidden.to(noise_embeds.dtype))

    def _masks(self, positions: Tensor) -> Sequence[Mask]:
        keys = torch.arange(int(positions[0, -1]) + 1, device=positions.device)[None, None, None, :]
        masks: list[Mask] = []
        for causal, window in zip(self.drafter_config.causal, self.drafter_config.windows, strict=True):
            if not causal and window is None:
                masks.append(None)
                continue
            seen = visible_rule(causal, window)(keys, keys, positions[:, None, :, None], keys)
            masks.append(additive(seen, self.network.fc.weight.dtype))
        return masks


class _Behind:
    """Puts the context's new keys and values before the block's, and both behind what the cache holds."""

    def __init__(self, context: list[tuple[Tensor, Tensor]], cache: Cache):
        self.context, self.cache = context, cache
        self.held: list[Tensor] = []  # keys and values of all layers so far

    def update(self, keys: Tensor, values: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        context_keys, context_values = self.context[layer]
        held = self.cache.update(torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2), layer)
        self.held += held
        return held
