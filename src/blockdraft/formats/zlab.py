"""z-lab's flat layout: ``config.json`` and ``model.safetensors``, names without a prefix, no embedding, no head.

Read in the schemas in use: A has ``block_size`` on top and ``rope_theta``, B has both nested (``dflash_config``,
``rope_parameters``), C is B with the keys of DFlash 2. Look-up order of the reference (z-lab/dflash 0.1.0): ``dflash_config``, then
the top level, then a default.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.formats import folder as files

# Keys that reveal a relative of DFlash with other slots or further modules: shapes would fit, the output would be garbage.
_RELATIVES = ("projector_type", "shift_label", "sample_from_anchor", "markov_rank")
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys that have a meaning here, or none for any reader.
NESTED = set(
    "block_size causal final_logit_softcapping input_embedding_scale mask_token_id output_multiplier projector_type "
    "swa_window_size target_layer_ids use_swa".split()
) | set(_SECOND)
TOP = set(
    "architectures auto_map dflash_config dtype is_causal layer_types model_type num_target_layers rope_scaling rope_theta "
    "sliding_window torch_dtype transformers_version use_sliding_window".split()
)
LAYERS = Qwen3Config().to_dict()


class WindowOff(UsageError):
    """Sliding layers, and no window in force: runtimes disagree about those.

    Attributes:
        size: of the window that the file names for all that; None: it names none.
    """

    def __init__(self, sentence: str, size: int | None):
        super().__init__(sentence)
        self.size = size


def read(folder: Path, window: int | None = None) -> DFlash:
    """A DFlash network in float32 or the file's dtype, on the CPU.

    Args:
        window: as for ``read_config``.

    Raises:
        WindowOff: a file that leaves open whether its layers slide.
        UsageError: not a DFlash drafter, a key or tensor missing or of the wrong shape, or a damaged file.
    """
    config = read_config(folder, window)
    try:
        network = DFlash(config)
    except Exception as error:  # sizes, activations and rope kinds that no layer can be built from
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{folder / 'config.json'} cannot be built: {type(error).__name__}: {reason}") from error
    files.fill(network, files.read_tensors(folder), folder)
    return network


def write(network: DFlash, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` into an existing folder, in both schemas at once.

    Raises:
        UsageError: a meaning that the layout cannot hold: windows of several sizes, or a causality that is neither one for all
            layers nor that of the sliding ones.
    """
    config = network.config
    sizes = {window for window in config.windows if window is not None}
    by_window = config.causal == tuple(window is not None for window in config.windows)
    if len(sizes) > 1 or (len(set(config.causal)) > 1 and not by_window):
        raise UsageError(
            "z-lab's layout has one window size, and one causality for all layers or for the sliding ones; this drafter has others"
        )
    window = next(iter(sizes), None)
    name = str(dtype).removeprefix("torch.")
    rope = dict(config.backbone.rope_parameters or {})
    theta = rope.pop("rope_theta")
    nested: dict[str, Any] = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    nested["target_layer_ids"] = list(config.taps)
    nested["input_embedding_scale"], nested["output_multiplier"] = config.embedding_scale, config.output_multiplier
    if config.softcap is not None:
        nested["final_logit_softcapping"] = config.softcap
    if config.convolution is not None and config.selector is not None:
        nested |= dict(zip(_SECOND, (*config.convolution, *config.selector), strict=True))
    raw = {key: value for key, value in config.backbone.to_dict().items() if key not in ("transformers_version", "_name_or_path")}
    raw |= {
        "architectures": ["DFlash2DraftModel" if config.selector else "DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": nested,
        "num_target_layers": config.target_layers,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "layer_types": ["full_attention" if own is None else "sliding_attention" for own in config.windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "dtype": name,
    }
    if len(set(config.causal)) == 1:  # never for a mixed file: it would rule all layers
        raw["is_causal"] = config.causal[0]
    files.write(raw, network, folder, dtype)


def read_config(folder: Path, window: int | None = None) -> DFlashConfig:
    """The meaning of a z-lab ``config.json``.

    Args:
        window: of the sliding layers, whatever the file says; 0: every layer is a full one; None: as the file says.

    Raises:
        WindowOff: layers slide, and no window is in force.
        UsageError: missing, damaged, or not of a DFlash drafter; names the key.
    """
    raw = files.read_config(folder)
    if window is not None:
        raw |= {"use_sliding_window": True, "sliding_window": window} if window else {"layer_types": None}
    try:
        return _meaning(folder, raw)
    except WindowOff as error:
        raise WindowOff(f"{folder / 'config.json'}: {error}", error.size) from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{folder / 'config.json'} does not describe a DFlash drafter: {type(error).__name__}: {reason[:200]}"
        ) from error


def _meaning(folder: Path, raw: dict[str, Any]) -> DFlashConfig:
    nested = raw.get("dflash_config") or {}
    _refuse_relatives(folder, raw, nested)
    for key in ("num_hidden_layers", "hidden_size", "num_target_layers"):
        if key not in raw:
            raise UsageError(f"{folder / 'config.json'} has no {key!r}: not a DFlash drafter in z-lab's layout")

    def value(key: str, default: Any = None) -> Any:
        return nested.get(key, raw.get(key, default))

    backbone = _backbone(raw)
    causal, windows = visibility_per_layer(raw, backbone)
    taps = value("target_layer_ids") or default_taps(raw["num_target_layers"], raw["num_hidden_layers"])
    if value("mask_token_id") is None:
        raise UsageError(f"{folder / 'config.json'} has no 'mask_token_id': which token fills the empty slots is unknown")
    softcap = value("final_logit_softcapping")
    second: list[tuple[int, int] | None] = [None, None]
    if "DFlash2DraftModel" in (raw.get("architectures") or []):
        sizes = [files.whole_number(key, value(key)) for key in _SECOND]
        second = [(sizes[0], sizes[1]), (sizes[2], sizes[3])]
    return DFlashConfig(
        backbone=backbone,
        block_size=files.whole_number("block_size", value("block_size", 16)),
        mask_token_id=files.whole_number("mask_token_id", value("mask_token_id")),
        taps=files.whole_numbers("target_layer_ids", taps),
        target_layers=files.whole_number("num_target_layers", raw["num_target_layers"]),
        causal=causal,
        windows=windows,
        embedding_scale=float(value("input_embedding_scale", 1.0)),
        output_multiplier=float(value("output_multiplier", 1.0)),
        softcap=float(softcap) if softcap and float(softcap) > 0 else None,
        convolution=second[0],
        selector=second[1],
    )


def unknown_keys(raw: dict[str, Any]) -> list[str]:
    """Keys of a config that mean nothing here."""
    nested = {f"dflash_config.{key}" for key in (raw.get("dflash_config") or {}).keys() - NESTED - TOP}
    return sorted((raw.keys() - NESTED - TOP - LAYERS.keys()) | nested)


def default_taps(target_layers: int, taps: int) -> list[int]:
    """Evenly spread layers from 1 to N-3, rounded half to even (z-lab ``build_target_layer_ids``)."""
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]


def visibility_per_layer(raw: dict[str, Any], backbone: Qwen3Config) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality and window of every layer.

    A set ``is_causal`` rules all layers, then ``dflash_config.causal``, else a layer is causal iff it slides. The window is
    ``dflash_config.swa_window_size`` on all layers under ``use_swa``, else ``sliding_window`` on the sliding ones.

    Raises:
        WindowOff: sliding layers whose window is switched off (``use_sliding_window`` false or not said) or has no size.
    """
    nested = raw.get("dflash_config") or {}
    layers = backbone.num_hidden_layers
    types = raw.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers:
        raise UsageError(f"layer_types names {len(types)} layers, num_hidden_layers is {layers}")
    sliding = [kind == "sliding_attention" for kind in types]
    if files.flag("use_swa", nested.get("use_swa") or False):
        windows: list[int | None] = [files.whole_number("swa_window_size", nested.get("swa_window_size"))] * layers
    elif any(sliding) and backbone.sliding_window is None:
        size = raw.get("sliding_window")
        raise WindowOff(
            "it has sliding_attention layers but no window in force; set use_sliding_window to true and sliding_window to the "
            "window it was trained with, or layer_types to full_attention",
            size if isinstance(size, int) and size > 0 else None,
        )
    else:
        windows = [backbone.sliding_window if slides else None for slides in sliding]
    flag = raw.get("is_causal")
    flag = nested.get("causal") if flag is None else flag
    causal = sliding if flag is None else [files.flag("is_causal", flag)] * layers
    return tuple(causal), tuple(windows)


def _backbone(raw: dict[str, Any]) -> Qwen3Config:
    ours = {"architectures", "auto_map", "dflash_config", "model_type", "torch_dtype", "transformers_version", "is_causal"}
    known = (LAYERS.keys() | {"rope_theta", "rope_scaling", "partial_rotary_factor"}) - ours
    try:
        config = Qwen3Config(**{key: value for key, value in raw.items() if key in known})
    except Exception as error:  # transformers' own checks raise many kinds
        raise ValueError(" ".join(str(error).split())) from error
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if raw.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        warnings.warn(
            f"rope_theta is {raw['rope_theta']} on top and {rope['rope_theta']} in rope_parameters; the latter is read, as in "
            "transformers"
        )
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and rope["rope_type"] == "default":
        warnings.warn(f"partial_rotary_factor {partial} has no effect on a Qwen3 drafter, in the reference and here")
    return config


def _refuse_relatives(folder: Path, raw: dict[str, Any], nested: dict[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    second = "DFlash2DraftModel" in architectures
    for key in () if second else _SECOND:
        if nested.get(key, raw.get(key)):
            raise UsageError(f"{folder} has {key}, as DFlash 2 has, but its architectures do not say DFlash2DraftModel")
    for key in _RELATIVES:
        found = nested.get(key, raw.get(key))
        if found and not (key == "projector_type" and found == "dflash"):
            raise UsageError(f"{folder} is not a plain DFlash drafter: its config says {key} = {found!r}")
    if architectures and not second and "DFlashDraftModel" not in architectures:
        raise UsageError(f"{folder} holds a {architectures[0]}, not a DFlash drafter (DFlashDraftModel)")
