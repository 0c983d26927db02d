"""transformers' own DFlash assistant (``MuseGlimmerAssistantModel``, transformers >= 5.15) as a folder.

It is z-lab's network under other names: what is written here goes into ``target.generate(..., assistant_model=
AutoModel.from_pretrained(folder), speculation_type="dflash")`` as it is. All its layers look both ways, and its window counts one
token more.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.formats import folder as files
from blockdraft.targets.target import Target

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
OURS = {theirs: ours for ours, theirs in NAMES.items()}
SHARED = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_parameters "
    "max_position_embeddings attention_dropout hidden_act"
).split()


def is_assistant(raw: dict[str, Any]) -> bool:
    """Whether a config is that of transformers' assistant."""
    return raw.get("model_type") == MODEL_TYPE


def unknown_keys(raw: dict[str, Any]) -> list[str]:
    """Keys of a config that mean nothing here."""
    usual = "architectures block_size bos_token_id dtype eos_token_id layer_types mask_token_id model_type pad_token_id"
    more = "sliding_window target_layer_ids tie_word_embeddings transformers_version use_cache initializer_range vocab_size"
    return sorted(raw.keys() - {*SHARED, *usual.split(), *more.split()})


def read(folder: Path, target: Target) -> DFlash:
    """A DFlash network in the file's dtype, on the CPU.

    Raises:
        UsageError: a key or tensor missing or wrong, or a damaged file.
    """
    raw = files.read_config(folder)
    missing = [key for key in (*SHARED, "block_size", "mask_token_id", "target_layer_ids") if raw.get(key) is None]
    if missing:
        raise UsageError(f"{folder / 'config.json'} has no {', '.join(missing)}: not a whole {ARCHITECTURE}")
    with files.building(folder / "config.json"):
        backbone = Qwen3Config(**{key: raw[key] for key in SHARED}, vocab_size=target.embedding.num_embeddings)
        layers = backbone.num_hidden_layers
        kinds = raw.get("layer_types") or ["sliding_attention"] * layers  # defaults of transformers' class
        if len(kinds) != layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
        wide = 1 + files.whole_number("sliding_window", 2048 if raw.get("sliding_window") is None else raw["sliding_window"])
        if wide < 2 and "sliding_attention" in kinds:
            raise ValueError(f"sliding_window is {wide - 1}; it must be at least 1")
        config = DFlashConfig(
            backbone=backbone,
            block_size=files.whole_number("block_size", raw["block_size"]),
            mask_token_id=files.whole_number("mask_token_id", raw["mask_token_id"]),
            taps=files.whole_numbers("target_layer_ids", raw["target_layer_ids"]),
            target_layers=len(target.layers),
            causal=(False,) * layers,
            windows=tuple(wide if kind == "sliding_attention" else None for kind in kinds),
            embedding_scale=_module_scale(target),
        )
        network = DFlash(config)
    files.fill(network, {files.renamed(name, OURS): tensor for name, tensor in files.read_tensors(folder).items()}, folder)
    return network


def write(network: DFlash, folder: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing folder.

    Raises:
        UsageError: a meaning that the class does not have: causal layers, windows of several sizes, scaled or capped logits,
            biases, or an embedding scale other than that of the target's embedding module, whose output it is given.
    """
    config, c = network.config, network.config.backbone
    windows = {window for window in config.windows if window is not None}
    scale = _module_scale(target)
    for fault, holds in (
        ("convolutions and selector", config.selector is not None),
        ("causal layers", any(config.causal)),
        ("windows of several sizes", len(windows) > 1),
        ("a window of one token", 1 in windows),
        ("an output multiplier or soft cap", config.output_multiplier != 1 or config.softcap is not None),
        ("biases", any(name.endswith(".bias") for name in network.state_dict())),
        (
            f"an embedding scale of {config.embedding_scale:g} for a target that scales by {scale:g}",
            not math.isclose(config.embedding_scale, scale, rel_tol=1e-5),
        ),
    ):
        if holds:
            raise UsageError(f"transformers' assistant class cannot say this of a drafter: {fault}")
    raw = {key: getattr(c, key) for key in SHARED} | {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "sliding_window": next(iter(windows), 2) - 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    files.write(raw, network, folder, dtype, partial(files.renamed, prefixes=NAMES))


def _module_scale(target: Target) -> float:
    """By how much the target's embedding module scales its rows."""
    module = target.model.get_input_embeddings()
    with torch.inference_mode():
        ids = torch.arange(8, device=target.device)
        scale = float(module(ids).double().norm() / target.embedding.weight[ids].double().norm())
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale
