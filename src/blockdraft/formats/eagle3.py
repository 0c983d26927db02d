"""SafeAILab's layout of an EAGLE-3 drafter: the ``config.json`` of a one-layer Llama with ``draft_vocab_size``, and its tensors.

The weights are ``model.safetensors`` or, in older ones, ``pytorch_model.bin``. ``d2t`` holds *offsets*: the target's id minus the
drafter's. The tapped layers are said nowhere (inputs of 2, N // 2 and N - 3), or in
``eagle_config.eagle_aux_hidden_state_layer_ids``, which counts inputs too.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from blockdraft.drafters.eagle3 import Eagle3, Eagle3Config, default_taps
from blockdraft.errors import UsageError
from blockdraft.formats import folder as files

ARCHITECTURE = "LlamaForCausalLMEagle3"
OURS = set("architectures model_type torch_dtype dtype eagle_config auto_map draft_vocab_size transformers_version".split())


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether a config is that of an EAGLE-3 drafter: SafeAILab's own says ``LlamaForCausalLM``, others ``...Eagle3``."""
    return "draft_vocab_size" in raw and not any("dflash" in str(name).lower() for name in raw.get("architectures") or [])


def read(folder: Path, target_layers: int, embedding: Tensor | None = None) -> Eagle3:
    """An EAGLE-3 network in the file's dtype, on the CPU.

    Args:
        target_layers: of the target, for the usual tapped layers.
        embedding: ``[vocabulary, hidden]`` of the target: a copy of another one in the file tells that the drafter is not for it.

    Raises:
        UsageError: not such a drafter, a key or tensor missing or wrong, a damaged file, a vocabulary that maps nowhere, or
            another target's embedding.
    """
    raw = files.read_config(folder)
    try:
        network = Eagle3(_meaning(folder, raw, target_layers))
    except UsageError:
        raise
    except Exception as error:  # sizes, activations and rope kinds that no layer can be built from
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{folder / 'config.json'} does not describe an EAGLE-3 drafter: {type(error).__name__}: {reason}"
        ) from error
    tensors = files.read_tensors(folder, pickled=True)
    copy = tensors.pop("embed_tokens.weight", None)
    if copy is not None and embedding is not None and not _alike(copy, embedding):
        raise UsageError(f"{folder} was made for another target: the embedding that it holds a copy of is not this target's")
    files.fill(network, tensors, folder)
    network.check(folder)
    return network


def _alike(copy: Tensor, embedding: Tensor) -> bool:
    """Whether one is the other, but for rounding, quantisation and a scale; padding rows aside."""
    if copy.shape[1:] != embedding.shape[1:]:
        return False
    rows = min(len(copy), len(embedding), 1024)
    ours, theirs = (table[:rows].detach().float().cpu() for table in (embedding, copy))
    return float((ours * theirs).sum() / (ours.norm() * theirs.norm())) > 0.9


def unknown_keys(raw: dict[str, Any]) -> list[str]:
    """Keys of a config that mean nothing here."""
    return sorted(raw.keys() - LlamaConfig().to_dict().keys() - OURS - {"rope_theta", "rope_scaling"})


def write(network: Eagle3, folder: Path, target_layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing folder."""
    config = network.config
    rope = dict(config.backbone.rope_parameters or {})
    raw = {key: value for key, value in config.backbone.to_dict().items() if key not in ("transformers_version", "_name_or_path")}
    raw |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocabulary,
        "draft_vocab_size": config.words,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if config.taps != default_taps(target_layers):
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps]}
    files.write(raw, network, folder, dtype)


def _meaning(folder: Path, raw: dict[str, Any], target_layers: int) -> Eagle3Config:
    if not is_eagle3(raw):
        raise UsageError(f"{folder / 'config.json'} has no 'draft_vocab_size': not an EAGLE-3 drafter in SafeAILab's layout")
    if raw.get("num_hidden_layers", 1) != 1:
        raise UsageError(f"{folder} has {raw['num_hidden_layers']} layers; an EAGLE-3 drafter has one")
    inputs = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(int(i) - 1 for i in inputs) if inputs else default_taps(target_layers)
    known = LlamaConfig().to_dict().keys() | {"rope_theta", "rope_scaling"}
    kept = {key: value for key, value in raw.items() if key in known - OURS}
    return Eagle3Config(LlamaConfig(**kept), int(raw["draft_vocab_size"]), int(raw["vocab_size"]), taps)
