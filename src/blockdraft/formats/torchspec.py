"""TorchSpec's folder of a DFlash drafter: z-lab's network under other names, and no block size.

``num_target_layers`` is the number of *taps* there; the target's depth is ``target_num_hidden_layers``.
"""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.formats import folder as files
from blockdraft.formats import zlab
from blockdraft.targets.target import Target

NAMES = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}
ELSEWHERE = set(
    "architectures auto_map block_size dtype mask_token_id model_type num_target_layers target_hidden_size target_layer_ids "
    "target_num_hidden_layers torch_dtype transformers_version".split()
)


def is_torchspec(raw: dict[str, Any]) -> bool:
    """Whether a config is TorchSpec's."""
    return raw.get("model_type") == "dflash" and "dflash_config" not in raw


def unknown_keys(raw: dict[str, Any]) -> list[str]:
    """Keys of a config that mean nothing here."""
    return sorted(raw.keys() - zlab.LAYERS.keys() - ELSEWHERE - {"is_causal", "rope_theta"})


def read(folder: Path, target: Target) -> DFlash:
    """A DFlash network in the file's dtype, on the CPU.

    Raises:
        UsageError: a key or tensor missing or wrong; without ``block_size`` in its config.json, which has to be added by hand.
    """
    raw = files.read_config(folder)
    if raw.get("block_size") is None:
        raise UsageError(
            f"{folder / 'config.json'} says no block_size, as is usual for TorchSpec; add the one it was trained with, say "
            "block_size: 16"
        )
    missing = [key for key in ("mask_token_id", "target_layer_ids", "target_num_hidden_layers") if raw.get(key) is None]
    if missing:
        raise UsageError(f"{folder / 'config.json'} has no {', '.join(missing)}: not a whole TorchSpec drafter")
    with files.building(folder / "config.json"):
        backbone = Qwen3Config(**{key: value for key, value in raw.items() if key in zlab.LAYERS.keys() - ELSEWHERE})
        try:
            causal, windows = zlab.visibility_per_layer(raw, backbone)
        except zlab.WindowOff as error:
            raise UsageError(f"{folder / 'config.json'}: {error}") from None
        network = DFlash(
            DFlashConfig(
                backbone=backbone,
                block_size=files.whole_number("block_size", raw["block_size"]),
                mask_token_id=files.whole_number("mask_token_id", raw["mask_token_id"]),
                taps=files.whole_numbers("target_layer_ids", raw["target_layer_ids"]),
                target_layers=files.whole_number("target_num_hidden_layers", raw["target_num_hidden_layers"]),
                causal=causal,
                windows=windows,
            )
        )
    tensors = files.read_tensors(folder)
    files.refuse_another("embedding", tensors.pop("embed_tokens.weight", None), target.embedding.weight, folder, target.name)
    files.fill(network, {files.renamed(name, NAMES): tensor for name, tensor in tensors.items()}, folder)
    return network
