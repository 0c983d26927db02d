"""Dialects: which layout, family and trainer a drafter's file speaks of, from its config alone, and what can be done with it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.formats import assistant, eagle3, gguf, speculators, torchspec
from blockdraft.formats import folder as files

LAYOUTS = ("zlab", "speculators", "gguf", "transformers", "safeailab")


@dataclass
class Dialect:
    """What a drafter says of itself.

    Attributes:
        layout: zlab, speculators, gguf, safeailab, transformers, torchspec, deepspec.
        family: DFlash, DFlash 2, EAGLE-3, DSpark, Domino, or a language model.
        trainer: who writes such files, as far as it can be told.
        facts: sizes and settings, in the reader's order.
        refused: why it cannot be read here; None: it can.
        raw: the config's keys, or the GGUF's fields.
    """

    layout: str
    family: str
    trainer: str
    facts: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)

    def into(self) -> dict[str, str | None]:
        """The layouts it can be converted to: None, or why not."""
        if self.refused:
            return dict.fromkeys(LAYOUTS, self.refused)
        if self.family == "EAGLE-3":
            only = "EAGLE-3 has the layouts safeailab and speculators"
            return {layout: None if layout in ("safeailab", "speculators") else only for layout in LAYOUTS}
        reasons: dict[str, str | None] = {
            **dict.fromkeys(LAYOUTS),
            "safeailab": "that is a layout of EAGLE-3, another architecture",
        }
        if self.family == "DFlash 2":
            reasons["transformers"] = "transformers' assistant class has no convolutions and no selector"
        lacking = [name for name in ("layers", "width") if self.facts.get(name) is None]
        if lacking:
            return dict.fromkeys(LAYOUTS, f"its config says nothing of its {' and '.join(lacking)}")
        own = self.facts.get("words")
        if own and own != self.facts.get("vocabulary"):
            reduced = f"its vocabulary is reduced to {own} words with a head of their own, which is used as it is and not converted"
            reasons = dict.fromkeys(LAYOUTS, reduced)
        return reasons


def recognise(path: Path) -> Dialect:
    """Look at a drafter folder or GGUF file; reads no weights.

    Raises:
        UsageError: neither, or damaged, or values of a wrong kind.
    """
    try:
        return _recognise(path)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} holds values of a wrong kind, and describes no drafter ({type(error).__name__}: {reason})"
        ) from error


def _recognise(path: Path) -> Dialect:
    if path.is_file() and path.suffix == ".gguf":
        return _gguf(path)
    if not path.is_dir():
        raise UsageError(f"there is no drafter folder or .gguf file {path}")
    raw = files.read_config(path)
    nested = raw.get("dflash_config") or {}
    architectures = [str(name) for name in raw.get("architectures") or []]
    if speculators.is_speculators(raw):
        return _speculators(raw)
    if "DSpark" in " ".join(architectures) or "markov_rank" in raw or "num_anchors" in raw:
        why = "DeepSpec's slots predict the token behind their own position: forced into DFlash they are right almost never"
        return Dialect("deepspec", "DSpark", "DeepSpec", _sizes(raw), why, raw)
    projector = nested.get("projector_type", raw.get("projector_type"))
    if projector in ("domino", "dspark") or nested.get("shift_label", raw.get("shift_label")):
        family = {"domino": "Domino", "dspark": "DSpark"}.get(str(projector), "a DFlash with shifted slots")
        return Dialect("zlab", family, "SpecForge", _sizes(raw), f"{family} has other slots than DFlash, and further modules", raw)
    if torchspec.is_torchspec(raw):
        return Dialect("torchspec", "DFlash", "TorchSpec", _sizes(raw), None, raw)
    if "DFlash2DraftModel" in architectures:
        return Dialect("zlab", "DFlash 2", "z-lab", _sizes(raw), None, raw)
    if nested or "DFlashDraftModel" in architectures:
        trainer = (
            "Model-Optimizer" if "torch_dtype" in raw and "use_swa" in nested else "z-lab, SpecForge, Model-Optimizer or blockdraft"
        )
        return Dialect("zlab", "DFlash", trainer, _sizes(raw), None, raw)
    if eagle3.is_eagle3(raw):
        return Dialect("safeailab", "EAGLE-3", "SafeAILab, SpecForge or blockdraft", _sizes(raw), None, raw)
    if assistant.is_assistant(raw):
        return Dialect("transformers", "DFlash", "transformers", _sizes(raw), None, raw)
    if any(name.endswith("ForCausalLM") for name in architectures):
        why = "a language model drafts as it is, with --drafter; there is nothing to convert"
        return Dialect("transformers", "a language model", "transformers", _sizes(raw), why, raw)
    raise UsageError(f"{path / 'config.json'} is of no drafter that is known here: no dflash_config, no draft_vocab_size")


def _speculators(raw: dict[str, Any]) -> Dialect:
    kind = str(raw["speculators_model_type"])
    family = {"dflash": "DFlash", "eagle3": "EAGLE-3", "dflash2": "DFlash 2"}.get(kind, kind)
    layer = {**speculators.layer_facts(raw), **{k: v for k, v in raw.items() if k != "transformer_layer_config"}}
    refused = None if kind in speculators.KEYS else f"speculators' {kind} drafters are not supported so far"
    if raw.get("sample_from_anchor"):
        refused = "its slots predict the token behind their own position (sample_from_anchor), which no DFlash drafter here does"
    return Dialect(
        "speculators", family, f"speculators {raw.get('speculators_version', 'of unknown version')}", _sizes(layer, 1), refused, raw
    )


def _gguf(path: Path) -> Dialect:
    header = gguf.read_header(path)
    if not gguf.is_drafter(header):
        raise UsageError(f"{path} is a GGUF file of architecture {header.architecture!r}, not of a DFlash drafter")
    arch, fields = header.architecture, header.fields
    facts = {
        "layers": fields.get(f"{arch}.block_count"),
        "width": fields.get(f"{arch}.embedding_length"),
        "heads": f"{fields.get(f'{arch}.attention.head_count')}/{fields.get(f'{arch}.attention.head_count_kv')}",
        "block": fields.get(f"{arch}.block_size"),
        "mask token": fields.get("tokenizer.ggml.mask_token_id", fields.get(f"{arch}.mask_token_id")),
        "weights": ", ".join(sorted({kind for kind, _ in header.tensors.values()})),
    }
    facts["causal"] = fields.get(f"{arch}.attention.causal")
    if window := fields.get(f"{arch}.attention.sliding_window"):
        sliding = [bool(slides) for slides in fields.get(f"{arch}.attention.sliding_window_pattern") or []]
        facts["sliding window"] = f"{window} tokens, {sum(sliding)} of {len(sliding)} layers" if sliding else f"{window} tokens"
    taps = fields.get("dflash.target_layers", fields.get(f"{arch}.dflash.target_layer_ids"))
    facts["tapped layers"] = None if taps is None else [int(i) - header.merged for i in taps]
    trainer = "llama.cpp's converter or blockdraft" if header.merged else "a fork of llama.cpp before the merge"
    family = "DFlash 2" if any("selector" in key for key in fields) else "DFlash"
    return Dialect("gguf", family, trainer, {k: v for k, v in facts.items() if v is not None}, None, fields)


def _sizes(raw: dict[str, Any], inputs: int = 0) -> dict[str, Any]:
    """Facts of a config; ``inputs``: by how much its layer ids count further than outputs."""
    nested = raw.get("dflash_config") or {}

    def value(*keys: str) -> Any:
        return next((place[key] for key in keys for place in (nested, raw) if place.get(key) is not None), None)

    taps = value("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
    heads = value("num_attention_heads")
    found = {
        "layers": value("num_hidden_layers"),
        "width": value("hidden_size"),
        "heads": None if heads is None else f"{heads}/{value('num_key_value_heads') or heads}",
        "block": value("block_size"),
        "mask token": value("mask_token_id"),
        "tapped layers": None if taps is None else [int(i) - inputs for i in taps],
        "target's layers": value("target_num_hidden_layers", "num_target_layers"),
        "vocabulary": value("vocab_size"),
        "words": value("draft_vocab_size"),
        "dtype": value("dtype", "torch_dtype"),
        "causal": value("is_causal", "causal"),
        "sliding window": _window(value("swa_window_size", "sliding_window"), value("use_swa", "use_sliding_window"), raw),
    }
    return {key: fact for key, fact in found.items() if fact is not None}


def _window(size: Any, in_force: Any, raw: dict[str, Any]) -> str | None:
    """What a config says of a window; None: nothing slides."""
    kinds = raw.get("layer_types") or []
    if "sliding_attention" not in kinds and not (raw.get("dflash_config") or {}).get("use_swa"):
        return None
    off = in_force is False or (in_force is None and raw.get("model_type") != assistant.MODEL_TYPE)
    where = f"{kinds.count('sliding_attention')} of {len(kinds)} layers"
    return f"{size} tokens, {where}" + (", switched off (blockdraft doctor tells what fits)" if off else "")
