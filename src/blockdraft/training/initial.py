"""The drafter at step 0: its sizes, its words or mask token, its first weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from blockdraft.drafters.eagle3 import Eagle3, Eagle3Config, default_taps
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.drafters.pairing import check_eagle3, check_pair
from blockdraft.errors import UsageError
from blockdraft.formats import eagle3, zlab
from blockdraft.targets.target import Target
from blockdraft.training.batches import Document
from blockdraft.training.config import TrainConfig
from blockdraft.training.documents import frequent_words


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
    _randomise(network, target)
    if config.init == "target":
        _copy_last_layers(network, target)
    check_pair(network, target, "of this config")
    return network


def first_eagle3(config: TrainConfig, target: Target, documents: Sequence[Document]) -> Eagle3:
    """The EAGLE-3 drafter that training starts from, float32, on the CPU.

    Its words are the most frequent ones of the documents' answers; a corpus of fewer: all of them. Its head begins as the target's
    rows of these words, unless ``init`` is scratch.

    Raises:
        UsageError: sizes or taps that do not fit the target, or first weights that do not fit the sizes.
    """
    if config.init not in ("scratch", "target"):
        return _from_eagle3(config, target)
    words = frequent_words(documents)[: config.words].sort().values
    backbone = LlamaConfig(**_sizes(config, target), num_hidden_layers=1)
    taps = tuple(config.taps) or default_taps(len(target.layers))
    torch.manual_seed(config.seed)
    network = Eagle3(Eagle3Config(backbone, len(words), target.embedding.num_embeddings, taps))
    _randomise(network, target)
    network.d2t.copy_(words - torch.arange(len(words)))
    network.t2d.fill_(False)[words] = True
    if config.init == "target":
        _copy_last_layer(network, target, words)
    check_eagle3(network, target, "of this config")
    return network


def _randomise(network: nn.Module, target: Target) -> None:
    for parameter in network.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=getattr(target.config, "initializer_range", 0.02))


def _from_drafter(config: TrainConfig, target: Target) -> DFlash:
    folder = _folder(config)
    network = zlab.read(folder).float()
    found = network.config
    if found.selector is not None:
        raise UsageError(f"init is {folder}, a DFlash 2 drafter; training goes on from DFlash drafters only")
    asked = {
        "layers": (config.layers, found.backbone.num_hidden_layers),
        "taps": (tuple(config.taps) or found.taps, found.taps),
        "window": (config.window or found.windows[0], found.windows[0]),
        "mask_token_id": (found.mask_token_id if config.mask_token_id is None else config.mask_token_id, found.mask_token_id),
    }
    _refuse_other_sizes(config, found.backbone, asked, folder)
    network.config = replace(found, block_size=config.block_size)  # no weight depends on it: short blocks first, long ones later
    check_pair(network, target, config.init)
    return network


def _from_eagle3(config: TrainConfig, target: Target) -> Eagle3:
    folder = _folder(config)
    network = eagle3.read(folder, len(target.layers)).float()
    found = network.config
    asked = {"words": (config.words, found.words), "taps": (tuple(config.taps) or found.taps, found.taps)}
    _refuse_other_sizes(config, found.backbone, asked, folder)
    check_eagle3(network, target, config.init)
    return network


def _folder(config: TrainConfig) -> Path:
    folder = Path(config.init).expanduser()
    if not folder.is_dir():
        raise UsageError(f"init is {config.init!r}; it must be scratch, target, or a drafter folder")
    return folder


def _refuse_other_sizes(config: TrainConfig, sizes: Any, asked: dict[str, tuple[Any, Any]], folder: Path) -> None:
    """Raise UsageError where the config asks for what the drafter of a folder does not have: ``asked`` and its layers' sizes."""
    asked = asked | {
        "heads": (config.heads or sizes.num_attention_heads, sizes.num_attention_heads),
        "kv_heads": (config.kv_heads or sizes.num_key_value_heads, sizes.num_key_value_heads),
        "head_dim": (config.head_dim or sizes.head_dim, sizes.head_dim),
        "intermediate_size": (config.intermediate_size or sizes.intermediate_size, sizes.intermediate_size),
    }
    for name, (value, theirs) in asked.items():
        if value != theirs:
            raise UsageError(f"{name} is {value}, but the drafter in {folder} has {theirs}; training cannot go on from it")


def drafter_config(config: TrainConfig, target: Target, documents: Sequence[Document]) -> DFlashConfig:
    """Sizes from the config, the target's where it is silent.

    Raises:
        UsageError: no sound mask token, or sizes that no layer can have.
    """
    layers = len(target.layers)
    taps = config.taps or zlab.default_taps(layers, config.layers)
    backbone = Qwen3Config(
        **_sizes(config, target),
        num_hidden_layers=config.layers,
        use_sliding_window=config.window is not None,
        sliding_window=config.window,
        layer_types=["sliding_attention" if config.window else "full_attention"] * config.layers,
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


def _sizes(config: TrainConfig, target: Target) -> dict[str, Any]:
    """What the layers of all drafters have, as keys of a transformers config."""
    c = target.config
    heads = config.heads or c.num_attention_heads
    kv_heads = config.kv_heads or getattr(c, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UsageError(f"heads is {heads}, kv_heads {kv_heads}: the first must be a multiple of the second")
    return {
        "vocab_size": target.embedding.num_embeddings,
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or getattr(c, "intermediate_size", None) or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config.head_dim or getattr(c, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": getattr(c, "rms_norm_eps", 1e-6),
        "max_position_embeddings": target.context,
        "rope_parameters": _plain_rope(c),
        "tie_word_embeddings": False,
    }


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
        _copy_layer(ours.state_dict(), theirs)
    _copy_final_norm(network.norm, target)


def _copy_last_layer(network: Eagle3, target: Target, words: Tensor) -> None:
    """The last layer, where it reads features; what reads the token's embedding stays random. And the head's rows of the words."""
    ours = network.midlayer.state_dict()
    ours["input_layernorm.weight"] = ours.pop("hidden_norm.weight")
    for name in ("q_proj", "k_proj", "v_proj"):
        ours[f"self_attn.{name}.weight"] = ours[f"self_attn.{name}.weight"][:, target.hidden_size :]
    _copy_layer(ours, target.layers[-1])
    _copy_final_norm(network.norm, target)
    network.lm_head.load_state_dict({"weight": target.head.get_parameter("weight").detach()[words.to(target.device)].float().cpu()})


def _copy_layer(ours: dict[str, Tensor], theirs: nn.Module) -> None:
    """Fill tensors of a drafter's layer, named as in the target's, with those of one of its layers."""
    source = theirs.state_dict()
    for name, tensor in ours.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in source:
            continue  # most targets have no such norms: they start as ones
        if name.endswith("norm.weight") and name in source and not plain_norm(theirs.get_submodule(name[: -len(".weight")])):
            continue  # a norm of another kind (Gemma's weighs by 1 + w): ours starts as ones
        if name not in source or source[name].shape != tensor.shape:
            found = list(source[name].shape) if name in source else "nothing of that name"
            raise UsageError(
                f"init is target, but its layers have {found} for {name} {list(tensor.shape)}; use init=scratch, or its sizes"
            )
        tensor.copy_(source[name])


def _copy_final_norm(ours: nn.Module, target: Target) -> None:
    weight = getattr(target.final_norm, "weight", None)
    if target.final_norm is not None and weight is not None and weight.shape == ours.weight.shape and plain_norm(target.final_norm):
        ours.load_state_dict({"weight": weight.detach().float().cpu()})


def plain_norm(norm: torch.nn.Module) -> bool:
    """Whether a module of the target maps ``x`` to ``x / rms(x) * weight``, as the drafter's norms do."""
    weight: torch.Tensor = norm.get_parameter("weight").detach()
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device, dtype=weight.dtype)[None, None]
    with torch.inference_mode():
        found = norm(x).float()
    expected = x.float() / x.float().pow(2).mean().sqrt() * weight.float()
    return bool(torch.allclose(found, expected, atol=2e-2 * float(expected.abs().max())))
