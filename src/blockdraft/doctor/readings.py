"""Readings: every way a drafter's file could have been meant."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.drafters.network import DFlashConfig
from blockdraft.targets.target import Target

THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
WINDOWS = (128, 256, 512, 1024, 2048)  # of sliding layers


@dataclass(frozen=True)
class Reading:
    """One way to read a drafter's weights.

    Attributes:
        name: what is read another way.
        fault: what is wrong with the file if this reading is right.
        config: of the network.
        shifted: slot k predicts the token behind its own position, slot 0 included.
        normed: the last tapped layer is read behind the target's final norm.
    """

    name: str
    fault: str
    config: DFlashConfig
    shifted: bool = False
    normed: bool = False


def readings(config: DFlashConfig, target: Target, longest: int) -> Iterator[Reading]:
    """Every other way the file could have been meant; ``longest``: tokens of a text, which a window must be shorter than."""
    layers, layer = len(target.layers), list(config.taps)
    for step, told in ((-1, "one too high"), (1, "one too low")):
        taps = tuple(i + step for i in layer)
        if min(taps) >= 0 and max(taps) < layers:
            fault = f"its tapped layers {layer} are counted {told}: {list(taps)} fit better (outputs of layers, counted from 0)"
            yield Reading(f"tapped layers {list(taps)}", fault, replace(config, taps=taps))
    fault = "its slots predict the token behind their own position, slot 0 included (sample_from_anchor), and no reader does so"
    yield Reading("slots shifted by one", fault, config, shifted=True)
    for causal in {False, True} - ({config.causal[0]} if len(set(config.causal)) == 1 else set()):
        ours, theirs = ("causal", "bidirectional") if causal else ("bidirectional", "causal")
        fault = f"its blocks were trained {ours}, and are read {theirs}"
        yield Reading(f"{ours} blocks", fault, replace(config, causal=(causal,) * len(config.causal)))
    if any(config.windows):
        fault = f"its sliding window of {max(filter(None, config.windows))} tokens is not what it was trained with: none is better"
        yield Reading("no sliding window", fault, replace(config, windows=(None,) * len(config.windows)))
    for window in () if any(config.windows) else (window for window in WINDOWS if window < longest):
        fault = f"a sliding window of {window} tokens fits better than the full attention it is read with: it was trained with one"
        yield Reading(f"sliding window {window}", fault, replace(config, windows=(window,) * len(config.windows)))
    yield from _ropes(config, target)
    width = config.backbone.hidden_size
    for scale in sorted({1.0, round(math.sqrt(width), 6)} - {config.embedding_scale}):
        fault = f"its input_embedding_scale is {scale:g}, not {config.embedding_scale:g}"
        yield Reading(f"embedding scale {scale:g}", fault, replace(config, embedding_scale=scale))
    for token in _masks(config, target):
        fault = f"its mask token is {token}, not {config.mask_token_id}"
        yield Reading(f"mask token {token}", fault, replace(config, mask_token_id=token))
    if layer[-1] == layers - 1:
        fault = f"its last tapped layer {layer[-1]} was read behind the target's final norm in training, and readers tap before it"
        yield Reading("last tap behind the final norm", fault, config, normed=True)


def _ropes(config: DFlashConfig, target: Target) -> Iterator[Reading]:
    rope = dict(config.backbone.rope_parameters or {})
    theirs = dict(getattr(target.config, "rope_parameters", None) or {})
    known = {float(theirs["rope_theta"])} if "rope_theta" in theirs else set()
    for theta in sorted((known | set(THETAS)) - {float(rope["rope_theta"])}):
        fault = f"its rotary base (rope_theta) is {theta:g}{' like the target' * (theta in known)}, not {rope['rope_theta']:g}"
        yield Reading(f"rotary base {theta:g}", fault, _with_rope(config, {**rope, "rope_theta": theta}))
    if rope.get("rope_type", "default") != "default":
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        fault = f"its rotary scaling {rope['rope_type']} is not what it was trained with: none fits better"
        yield Reading("no rotary scaling", fault, _with_rope(config, plain))
    elif theirs.get("rope_type", "default") != "default":
        fault = f"its rotary embedding is scaled like the target's ({theirs['rope_type']}), and its config does not say so"
        yield Reading("the target's rotary scaling", fault, _with_rope(config, theirs))


def _with_rope(config: DFlashConfig, rope: dict[str, Any]) -> DFlashConfig:
    backbone = copy.deepcopy(config.backbone)
    backbone.rope_parameters = rope
    return replace(config, backbone=backbone)


def _masks(config: DFlashConfig, target: Target) -> list[int]:
    """Other tokens that could have filled the empty slots: special ones, those called mask first."""
    if target.tokenizer is None:
        return []
    added = {i: token for i, token in target.tokenizer.added_tokens_decoder.items() if token.special}
    ranked = sorted(added, key=lambda i: ("mask" not in added[i].content.lower(), i in target.end_tokens, i))
    return [i for i in ranked if i != config.mask_token_id and i < target.embedding.num_embeddings][:6]
