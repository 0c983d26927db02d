"""The drafter at step 0: its sizes, its mask token, its first weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3Config

from blockdraft.drafters.dflash import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.formats import zlab
from blockdraft.load import check_pair
from blockdraft.target import Target
from blockdraft.training.batches import Document
from blockdraft.training.config import TrainConfig


def first_network(config: TrainConfig, target: Target, documents: Sequence[Document]) -> DFlash:
    """The drafter that training starts from, float32, on the CPU.

    Raises:
        UsageError: sizes, taps or mask token that do not fit the target, or first weights that do not fit the sizes.
    """
    if config.init not in ("scratch", "target"):
        return _from_drafter(config, target)
    drafter = drafter_config(config, target, documents)
    torch.manual_seed(config.seed)
    network = DFlash(drafter)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=getattr(target.config, "initializer_range", 0.02))
    if config.init == "target":
        _copy_last_layers(network, target)
    check_pair(network, target, "of this config")
    return network


def _from_drafter(config: TrainConfig, target: Target) -> DFlash:
    folder = Path(config.init).expanduser()
    if not folder.is_dir():
        raise UsageError(f"init is {config.init!r}; it must be scratch, target, or a drafter folder")
    network = zlab.read(folder).float()
    found, sizes = network.config, network.config.backbone
    for name, value, theirs in (
        ("layers", config.layers, found.backbone.num_hidden_layers),
        ("taps", tuple(config.taps) or found.taps, found.taps),
        ("heads", config.heads or sizes.num_attention_heads, sizes.num_attention_heads),
        ("kv_heads", config.kv_heads or sizes.num_key_value_heads, sizes.num_key_value_heads),
        ("head_dim", config.head_dim or sizes.head_dim, sizes.head_dim),
        ("intermediate_size", config.intermediate_size or sizes.intermediate_size, sizes.intermediate_size),
        ("window", config.window or found.windows[0], found.windows[0]),
        ("mask_token_id", found.mask_token_id if config.mask_token_id is None else config.mask_token_id, found.mask_token_id),
    ):
        if value != theirs:
            raise UsageError(f"{name} is {value}, but the drafter in {folder} has {theirs}; training cannot go on from it")
    network.config = replace(found, block_size=config.block_size)  # no weight depends on it: short blocks first, long ones later
    check_pair(network, target, config.init)
    return network


def drafter_config(config: TrainConfig, target: Target, documents: Sequence[Document]) -> DFlashConfig:
    """Sizes from the config, the target's where it is silent.

    Raises:
        UsageError: no sound mask token, or sizes that no layer can have.
    """
    c = target.config
    layers = len(target.layers)
    taps = config.taps or zlab.default_taps(layers, config.layers)
    heads = config.heads or c.num_attention_heads
    kv_heads = config.kv_heads or getattr(c, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UsageError(f"heads is {heads}, kv_heads {kv_heads}: the first must be a multiple of the second")
    backbone = Qwen3Config(
        vocab_size=target.embedding.num_embeddings,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or getattr(c, "intermediate_size", None) or 4 * target.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.head_dim or getattr(c, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=getattr(c, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.context,
        rope_parameters=_plain_rope(c),
        use_sliding_window=config.window is not None,
        sliding_window=config.window,
        layer_types=["sliding_attention" if config.window else "full_attention"] * config.layers,
        tie_word_embeddings=False,
    )
    return DFlashConfig(
        backbone=backbone,
        block_size=config.block_size,
        mask_token_id=mask_token(config, target, documents),
        taps=tuple(taps),
        target_layers=layers,
        causal=(False,) * config.layers,
        windows=(config.window,) * config.layers,
    )


def _plain_rope(config: object) -> dict[str, object]:
    """Rotary embedding with the target's base; its long-context scaling is not copied."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return {"rope_type": "default", "rope_theta": float(parameters.get("rope_theta", 10000.0))}


def mask_token(config: TrainConfig, target: Target, documents: Sequence[Document]) -> int:
    """The id that fills empty slots: given, or a special token that neither the template nor the corpus uses, or a spare row.

    Raises:
        UsageError: the given one is pad, end or outside of the embedding, or no token is free.
    """
    rows, tokenizer = target.embedding.num_embeddings, target.tokenizer
    reserved = set(target.end_tokens)
    if tokenizer is not None:
        reserved |= {i for i in (tokenizer.pad_token_id, *tokenizer.all_special_ids) if i is not None}
    given = config.mask_token_id
    if given is not None:
        if not 0 <= given < rows:
            raise UsageError(f"mask_token_id is {given}; the target's embedding has rows 0 to {rows - 1}")
        if given in reserved:
            raise UsageError(
                f"mask_token_id is {given}, a pad, end or other special token in use; take one the target never writes"
            )
        return given
    used = {token for document in documents for token in document.ids}
    if tokenizer is not None:
        template = str(tokenizer.chat_template or "")
        special = [i for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content not in template]
        free = [i for i in sorted(special) if i not in reserved | used and i < rows]
        free += range(len(tokenizer), rows)
        if free:
            return int(free[0])
    raise UsageError(f"no unused special token in {target.name}'s vocabulary; name one with mask_token_id")


def _copy_last_layers(network: DFlash, target: Target) -> None:
    count = len(network.layers)
    if count > len(target.layers):
        raise UsageError(f"layers is {count}, the target has {len(target.layers)} to start from; use init=scratch")
    for ours, theirs in zip(network.layers, target.layers[-count:], strict=True):
        source = theirs.state_dict()
        state = ours.state_dict()
        for name, tensor in state.items():
            if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in source:
                continue  # most targets have no such norms: they start as ones
            if name.endswith("norm.weight") and name in source and not plain_norm(theirs.get_submodule(name[: -len(".weight")])):
                continue  # a norm of another kind (Gemma's weighs by 1 + w): ours starts as ones
            if name not in source or source[name].shape != tensor.shape:
                found = list(source[name].shape) if name in source else "nothing of that name"
                raise UsageError(
                    f"init is target, but its layers have {found} for {name} {list(tensor.shape)}; use init=scratch, or its sizes"
                )
            state[name] = source[name].float().cpu()
        ours.load_state_dict(state)
    norm = target.final_norm
    weight = getattr(norm, "weight", None)
    if norm is not None and weight is not None and weight.shape == network.norm.weight.shape and plain_norm(norm):
        network.norm.load_state_dict({"weight": weight.detach().float().cpu()})


def plain_norm(norm: torch.nn.Module) -> bool:
    """Whether a module of the target maps ``x`` to ``x / rms(x) * weight``, as the drafter's norms do."""
    weight: torch.Tensor = norm.get_parameter("weight").detach()
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)[None, None]
    with torch.inference_mode():
        found = norm(x).float()
    expected = x.float() / x.float().pow(2).mean().sqrt() * weight.float()
    return bool(torch.allclose(found, expected, atol=2e-2 * float(expected.abs().max())))
