"""speculators' layout (vllm-project/speculators 0.9.0) of DFlash and EAGLE-3 drafters: ``config.json`` and ``model.safetensors``.

Three things differ from the layouts of the authors and are seen in no tensor:

- tapped layers are counted as the *input* of a layer: one more than an output;
- ``transformer_layer_config`` holds only what differs from its class's defaults;
- ``d2t`` are offsets, and a DFlash too may have a reduced vocabulary with a head of its own.

The depth of the target stands nowhere, so reading needs the target.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from blockdraft.drafters.eagle3 import BLOCK_SIZE, Eagle3, Eagle3Config, default_taps
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.formats import folder as files
from blockdraft.targets.target import Target

VERSION = "0.9.0"
COMMON = set(
    "architectures auto_map draft_vocab_size dtype speculators_config speculators_model_type speculators_version "
    "target_hidden_size tie_word_embeddings torch_dtype transformer_layer_config transformers_version".split()
)
KEYS = {
    "dflash": set("aux_hidden_state_layer_ids block_size mask_token_id sample_from_anchor sliding_window_non_causal".split()),
    "dflash2": set(
        "aux_hidden_state_layer_ids block_size mask_token_id sample_from_anchor sliding_window_non_causal conv_kernel_size "
        "conv_group_size selector_rank selector_top_k".split()
    ),
    "eagle3": set(
        "eagle_aux_hidden_state_layer_ids embed_requires_grad fc_norm norm_before_fc norm_before_residual norm_output".split()
    ),
}

ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass
class Read:
    """A drafter as a folder holds it.

    Attributes:
        network: in the file's dtype, on the CPU.
        words: ``[words]`` int64, the target's ids of a DFlash's reduced vocabulary; None: it has the target's.
        head: ``[words, hidden]``, its own rows for them; None: the target's head.
    """

    network: DFlash | Eagle3
    words: Tensor | None = None
    head: Tensor | None = None


def is_speculators(raw: dict[str, Any]) -> bool:
    """Whether a config is in this layout."""
    return "speculators_model_type" in raw


def unknown_keys(raw: dict[str, Any]) -> list[str]:
    """Keys of a config that mean nothing here."""
    kind = str(raw.get("speculators_model_type"))
    inner = set(_inner(raw)) - _defaults(kind).keys() - ROPE - {"architectures", "dtype", "torch_dtype", "transformers_version"}
    return sorted((raw.keys() - COMMON - KEYS.get(kind, set())) | {f"transformer_layer_config.{key}" for key in inner})


def layer_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """``transformer_layer_config`` with what its class fills in."""
    return {**_defaults(str(raw.get("speculators_model_type"))), **_inner(raw)}


def _defaults(kind: str) -> dict[str, Any]:
    return (LlamaConfig() if kind == "eagle3" else Qwen3Config()).to_dict()


def _inner(raw: dict[str, Any]) -> dict[str, Any]:
    layer = raw.get("transformer_layer_config") or {}
    if not isinstance(layer, dict):
        raise UsageError(f"transformer_layer_config is {layer!r}, not an object of keys")
    return layer


def read(folder: Path, target: Target) -> Read:
    """A drafter of a target.

    Raises:
        UsageError: another algorithm, a slot convention or norm that is not known here, a tensor missing or wrong, or copies of the
            target's embedding and head that are not the target's.
    """
    raw = files.read_config(folder)
    kind = raw.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise UsageError(f"{folder} holds a speculators {kind!r} drafter; {', '.join(KEYS)} are supported")
    with files.building(folder / "config.json"):
        network = Eagle3(_eagle3(folder, raw, target)) if kind == "eagle3" else DFlash(_dflash(folder, raw, target))
    tensors = files.read_tensors(folder)
    files.refuse_another("embedding", tensors.pop("embed_tokens.weight", None), target.embedding.weight, folder, target.name)
    if isinstance(network, Eagle3):
        files.fill(network, {files.renamed(name, {"layers.0.": "midlayer."}): tensor for name, tensor in tensors.items()}, folder)
        network.check(folder)
        return Read(network)
    head, d2t, t2d = (tensors.pop(name, None) for name in ("lm_head.weight", "d2t", "t2d"))
    files.fill(network, tensors, folder)
    if raw.get("draft_vocab_size", 32000) == network.config.backbone.vocab_size:
        files.refuse_another("head", head, target.head.get_parameter("weight"), folder, target.name)
        return Read(network)
    count, width = raw.get("draft_vocab_size", 32000), network.config.backbone.hidden_size
    if head is None or d2t is None:
        raise UsageError(f"{folder} has a vocabulary of {count} words, but no lm_head.weight and d2t of them")
    if tuple(head.shape) != (count, width) or not head.is_floating_point() or not bool(head.isfinite().all()):
        raise UsageError(f"{folder}: lm_head.weight is not {count} x {width} finite numbers, as its config promises")
    if tuple(d2t.shape) != (count,) or d2t.is_floating_point():
        raise UsageError(f"{folder}: d2t is not {count} whole numbers, as its config promises")
    words = d2t + torch.arange(count)
    whole = network.config.backbone.vocab_size
    if int(words.min()) < 0 or int(words.max()) >= whole or len(words.unique()) < len(words):
        raise UsageError(f"{folder}: d2t does not map {len(head)} words to different ids from 0 to {whole - 1}")
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], words.sort().values):
        raise UsageError(f"{folder}: t2d and d2t disagree about which of the target's words the drafter has")
    return Read(network, words, head)


def write(network: DFlash | Eagle3, folder: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing folder.

    Raises:
        UsageError: a meaning that the layout cannot hold: scaled embeddings or logits, causality of another rule than its own.
    """
    config = network.config
    kind = "eagle3" if isinstance(config, Eagle3Config) else "dflash2" if config.selector else "dflash"
    stem = {"eagle3": "Eagle3", "dflash2": "DFlash2", "dflash": "DFlash"}[kind]
    drafted = (BLOCK_SIZE if isinstance(config, Eagle3Config) else config.block_size) - 1
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "architectures": [f"{stem}DraftModel"],
        "auto_map": {"": f"config.{stem}SpeculatorConfig"},
        "draft_vocab_size": config.words if isinstance(config, Eagle3Config) else config.backbone.vocab_size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": drafted, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": {**config.backbone.to_diff_dict(), "model_type": config.backbone.model_type},
    }
    raw["transformer_layer_config"].pop("transformers_version", None)
    inputs = [tap + 1 for tap in config.taps]
    if isinstance(config, Eagle3Config):
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
        raw |= {"eagle_aux_hidden_state_layer_ids": inputs, **dict.fromkeys(flags, False)}
    else:
        raw |= {
            "aux_hidden_state_layer_ids": inputs,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": False,
            "sliding_window_non_causal": _non_causal(config),
        }
        raw["transformer_layer_config"] |= _windows(config)
        if config.convolution is not None and config.selector is not None:
            raw |= dict(zip(SECOND, (*config.convolution, *config.selector), strict=True))
    files.write(raw, network, folder, dtype, partial(files.renamed, prefixes={"midlayer.": "layers.0."}))


def _dflash(folder: Path, raw: dict[str, Any], target: Target) -> DFlashConfig:
    if raw.get("sample_from_anchor"):
        raise UsageError(
            f"{folder} says sample_from_anchor: its slots predict the token behind their own position, and none here does that"
        )
    _refuse_width(folder, raw)
    backbone = Qwen3Config(**_layer_config(folder, raw, "qwen3"))
    kinds = backbone.layer_types or ["full_attention"] * backbone.num_hidden_layers
    windows = tuple(backbone.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    if any(kind == "sliding_attention" for kind in kinds) and backbone.sliding_window is None:
        raise UsageError(
            f"{folder / 'config.json'}: sliding_attention layers without a window in force; set use_sliding_window to true and "
            "sliding_window to the window it was trained with, in transformer_layer_config"
        )
    second = raw["speculators_model_type"] == "dflash2"
    non_causal = files.flag("sliding_window_non_causal", raw.get("sliding_window_non_causal", second))
    causal = tuple(window is not None and not non_causal for window in windows)
    sizes = [files.whole_number(key, raw[key]) for key in SECOND] if second else []
    if raw.get("mask_token_id") is None:
        raise UsageError(f"{folder / 'config.json'} has no 'mask_token_id': which token fills the empty slots is unknown")
    return DFlashConfig(
        backbone=backbone,
        block_size=files.whole_number("block_size", raw.get("block_size", 8)),
        mask_token_id=files.whole_number("mask_token_id", raw["mask_token_id"]),
        taps=_taps(raw.get("aux_hidden_state_layer_ids"), target),
        target_layers=len(target.layers),
        causal=causal,
        windows=windows,
        convolution=(sizes[0], sizes[1]) if sizes else None,
        selector=(sizes[2], sizes[3]) if sizes else None,
    )


def _eagle3(folder: Path, raw: dict[str, Any], target: Target) -> Eagle3Config:
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if raw.get(flag):
            raise UsageError(f"{folder} says {flag}: a variant of EAGLE-3 that is not supported here")
    _refuse_width(folder, raw)
    backbone = LlamaConfig(**_layer_config(folder, raw, "llama"))
    if backbone.num_hidden_layers != 1:
        raise UsageError(f"{folder} has {backbone.num_hidden_layers} layers; an EAGLE-3 drafter has one")
    taps = _taps(raw.get("eagle_aux_hidden_state_layer_ids"), target)
    words = files.whole_number("draft_vocab_size", raw.get("draft_vocab_size", 32000))
    return Eagle3Config(backbone, words, int(backbone.vocab_size), taps)


def _layer_config(folder: Path, raw: dict[str, Any], kind: str) -> dict[str, Any]:
    layer = dict(_inner(raw))
    found = layer.pop("model_type", "qwen3")
    if found != kind:
        raise UsageError(f"{folder}: layers of a {found}; this kind of drafter has layers of a {kind} here")
    if layer.get("is_causal") is not None:
        raise UsageError(f"{folder}: transformer_layer_config says is_causal, which readers take differently; take it out")
    known = _defaults("eagle3" if kind == "llama" else "dflash").keys() | ROPE
    return {key: value for key, value in layer.items() if key in known}


def _refuse_width(folder: Path, raw: dict[str, Any]) -> None:
    wide, own = raw.get("target_hidden_size"), layer_facts(raw)["hidden_size"]
    if wide is not None and wide != own:
        raise UsageError(f"{folder}: a drafter of width {own} for a target of width {wide}; both must be equal here")


def _taps(inputs: list[int] | None, target: Target) -> tuple[int, ...]:
    if not inputs:
        return default_taps(len(target.layers))
    return tuple(i - 1 for i in files.whole_numbers("aux_hidden_state_layer_ids", inputs))


def _non_causal(config: DFlashConfig) -> bool:
    """Whether sliding layers look both ways, which is one flag for all of them; layers without a window always do."""
    if config.embedding_scale != 1 or config.output_multiplier != 1 or config.softcap is not None:
        raise UsageError("speculators' layout has no place for the drafter's embedding scale, output multiplier or soft cap")
    if len({window for window in config.windows if window is not None}) > 1:
        raise UsageError("speculators' layout has one window for all sliding layers; this drafter has several")
    sliding = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is not None}
    full = {causal for causal, window in zip(config.causal, config.windows, strict=True) if window is None}
    if True in full or len(sliding) > 1:
        raise UsageError(
            "in speculators' layout all layers without a window look both ways, and all sliding ones alike; not in this drafter"
        )
    return True not in sliding


def _windows(config: DFlashConfig) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if own is None else "sliding_attention" for own in config.windows],
    }
