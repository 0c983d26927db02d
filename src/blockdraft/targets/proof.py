"""Proof: what a model is shown to do on a few tokens before it is decoded with.

Passes over a branching cache must give the logits of plain ones, and layers that run as one call those of the model's own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from blockdraft.engine.attention import additive, attending_over, causal, visibility
from blockdraft.engine.cache import KVCache
from blockdraft.engine.plain import PlainLayers, fits, plain_layer
from blockdraft.rules.proposal import Proposal
from blockdraft.targets.anatomy import Anatomy, first_tensor


class Passes(Protocol):
    """What is proved: a Target, half made."""

    model: PreTrainedModel
    config: PreTrainedConfig
    layers: list[nn.Module]
    device: torch.device

    def new_cache(self, rows: int, capacity: int) -> KVCache: ...

    def run(self, cache: KVCache, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def verify(self, cache: KVCache, anchors: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor | None]: ...

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None: ...

    def step(self, cache: KVCache, tokens: Tensor) -> Tensor: ...


def branching_logits(target: Passes, cache: KVCache, ids: Tensor) -> Tensor:
    """Logits ``[1, 12, vocabulary]`` of 12 ids by prefill, a tree of right and wrong tokens, commit, and one step."""
    wrong = (ids + 1) % target.config.vocab_size
    logits = [target.run(cache, ids[:, :5], cache.open(0, cache.positions_behind(0, 1, 5)).positions)[0]]
    cache.commit([range(5)])
    tokens = torch.stack([wrong[0, 6], ids[0, 6], wrong[0, 7], ids[0, 7], ids[0, 8]])[None]
    tree = Proposal(tokens, [6], torch.tensor([[0, 0, 2, 2, 4]], device=target.device))
    verified, _ = target.verify(cache, ids[:, 5], tree)
    path = [0, 2, 4, 5]
    logits.append(verified[:, path])
    target.commit(cache, [path])
    chain, _ = target.verify(cache, ids[:, 9], Proposal(ids[:, 10:11], [2]))
    logits.append(chain)
    target.commit(cache, [[0, 1]])
    logits.append(target.step(cache, ids[:, 11])[:, None])
    return torch.cat(logits, dim=1)


def plain_layers(parts: Anatomy, config: PreTrainedConfig) -> PlainLayers | None:
    """The layers as one call (``engine/plain.py``), if norms, linear layers and rotary module look like a Llama's; else None."""
    per_layer, rest = divmod(len(parts.linears) - 1, len(parts.layers))
    norms = [norm for found in parts.norms for norm in found] + [parts.final_norm]
    epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    if parts.rotary is None or rest or parts.final_norm is None or len(epsilons) > 1 or None in epsilons:
        return None
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = [parts.linears[i * per_layer : (i + 1) * per_layer] for i in range(len(parts.layers))]
    layers = [plain_layer(linears, found, size) for linears, found in zip(groups, parts.norms, strict=True)]
    if None in layers or not fits(layers, heads, size):  # type: ignore[arg-type]
        return None
    return PlainLayers(layers, heads, size, epsilons.pop())  # type: ignore[arg-type]


def layers_agree(target: Passes, plain: PlainLayers, ids: Tensor, start: int) -> bool:
    """Whether the first, a middle and the last layer put out the same in float32 for what they are given in a pass."""
    which = sorted({0, len(target.layers) // 2, len(target.layers) - 1})
    asked: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, kwargs: asked.__setitem__(layer, (args[0] if args else kwargs["hidden_states"], kwargs))

    handles = [target.layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in which]
    cache = target.new_cache(1, 32)
    positions = start + torch.arange(12, device=target.device)[None]
    span = cache.open(0, positions)
    try:
        target.run(cache, ids, positions)
    finally:
        for handle in handles:
            handle.remove()
    mask = additive(visibility(span, causal, target.device), cache.dtype)
    for i in which:
        x, given = (
            _as_float(asked[i][0]),
            {key: _as_float(value) for key, value in asked[i][1].items() if key != "hidden_states"},
        )
        weights = {name: parameter.float() for name, parameter in target.layers[i].named_parameters()}
        # With gradients enabled the packed layers multiply with the weights they are given.
        with attending_over(cache, target.model.config), torch.enable_grad():
            theirs = first_tensor(torch.func.functional_call(target.layers[i], weights, (x.clone(),), given)).detach()
        one = PlainLayers(plain.layers[i : i + 1], plain.heads, plain.size, plain.epsilon)
        rope = given["position_embeddings"]  # what both are given
        fresh = target.new_cache(1, 32)
        ours, _ = one.run(x, rope, fresh, fresh.open(0, positions), mask)
        if not float((ours - theirs).abs().mean()) < 1e-4 * float((theirs - x).abs().mean()):
            return False
    return True


def _as_float(value: Any) -> Any:
    """Tensors of floats as float32, in tuples too; copies, which do not belong to inference mode."""
    if isinstance(value, tuple):
        return tuple(_as_float(entry) for entry in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
