"""Doctor: why a target and a drafter do not fit, found by reading the drafter in every way it could have been meant.

A wrong layer offset or slot convention loads without a word and only costs acceptance, a few per cent at times. So every other
reading is scored on the same anchors of the target's own continuations, and the differences are judged conversation by
conversation: what is better beyond doubt is named, the best first. A reading that is worse beyond doubt is soon dropped.
"""

import copy
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlash, DFlashConfig
from blockdraft.drafters.shortlist import Shortlist, read_shortlist
from blockdraft.errors import UsageError
from blockdraft.load import check_pair, digest_of
from blockdraft.prompts import Message, encode
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.blocks import Blocks, block_embeddings

ANCHORS = 2000  # fewer cannot show a difference of a few per cent
TOKENS = 96  # of a continuation
SURE = 3.3  # standard errors of many conversations: a dozen readings are tried, and a healthy drafter must pass them all
FEW = 10  # conversations below which nothing can be told from chance
WORTH = 0.01  # a smaller gain, as a share of the acceptance length, is not worth a word
HARDLY = 1.1  # an acceptance length below which nothing works
MODE = 1.5  # how much more must be accepted in another mode of the template to be called a fault: texts differ in how easy they are
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


@dataclass(frozen=True)
class Doubt:
    """A window that a file names and does not put in force, so that readers refuse it or decide unlike.

    Attributes:
        sentence: says so.
        meant: with the window that it names in force; None: it names none.
        tried: with windows that it could have had, by their tokens.
    """

    sentence: str
    meant: DFlashConfig | None
    tried: dict[int, DFlashConfig]


@dataclass
class Score:
    """A reading on the probe, against the configured one.

    Attributes:
        name, fault: of the reading.
        anchors: that it was scored on.
        acceptance_length: mean over these of accepted tokens plus one, teacher-forced.
        difference, low, high: to the configured reading, paired, with its interval.
    """

    name: str
    fault: str
    anchors: int
    acceptance_length: float
    difference: float
    low: float
    high: float

    def better(self, base: float) -> bool:
        """Whether it is better beyond doubt, and worth a word."""
        return self.low > 0 and self.difference > WORTH * base


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        verdict: healthy, fault, or undecided.
        faults: sentences, the first is the cause.
        acceptance_length: as configured, on ``anchors`` anchors of ``conversations`` continuations; None: nothing could be run.
        scores: of every other reading.
        modes: acceptance length by how the prompts were put.
        notes: what the user should know besides.
        mended: the reading that fits best; None: there is no better one, or a file cannot say it.
    """

    verdict: str = "healthy"
    faults: list[str] = field(default_factory=list)
    acceptance_length: float | None = None
    anchors: int = 0
    conversations: int = 0
    scores: list[Score] = field(default_factory=list)
    modes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mended: DFlashConfig | None = None

    def told(self) -> dict[str, Any]:
        """For machines."""
        return {key: value for key, value in asdict(self).items() if key != "mended"} | {"can_fix": self.mended is not None}


def diagnose(
    network: DFlash,
    target: Target,
    conversations: Sequence[Sequence[Message]],
    folder: Path | None = None,
    anchors: int = ANCHORS,
    doubt: Doubt | None = None,
) -> Iterator[tuple[int, Diagnosis]]:
    """Check a pair; yields how many readings are scored, and the diagnosis so far.

    Args:
        network: the drafter, as configured.
        conversations: messages to ask the target.
        folder: where the drafter came from, for the target it names.
        anchors: to score on, at least.
        doubt: a window that the file leaves open, while the network has none: a fault, whatever fits.
    """
    found = Diagnosis()
    misfit = _static(network, target, folder, found)
    if misfit:
        found.verdict = "fault"
        yield 0, found
        return
    texts, modes = _continuations(target, conversations, anchors)
    if not texts:
        raise UsageError(
            f"there is nothing to score on: {target.name} ends every answer at once, or no prompt leaves {TOKENS} tokens of its "
            f"{target.context} for one; give other prompts with --probe"
        )
    probe = _Probe(network, target, read_shortlist(folder, target.vocab_size) if folder is not None and folder.is_dir() else None)
    config = network.config if doubt is None else _settled(doubt, network.config, probe, texts, found)
    base = Reading("as configured", "", config)
    plain = probe.accepted(base, texts)
    known = doubt is None or found.mended is not None
    found.acceptance_length, found.anchors = _mean(plain), sum(len(row) for row in plain)
    found.conversations = len(texts)
    if found.anchors < anchors:
        found.notes.append(f"only {found.anchors} anchors: a wrong layer offset could stay unseen; give more prompts with --probe")
    others = list(readings(config, target, max(len(ids) for ids, _ in texts)))
    best: tuple[Score, Reading] | None = None
    for number, other in enumerate(others, 1):
        score = _scored(probe, other, texts, plain)
        found.scores.append(score)
        if score.better(found.acceptance_length) and (best is None or score.difference > best[0].difference):
            best = score, other
        yield number, found
    found.scores.sort(key=lambda score: -score.difference)
    if len(texts) < FEW:
        found.notes.append(f"only {len(texts)} conversations: chance cannot be told from a fault; give at least {FEW} with --probe")
        best = None
    else:
        found.faults += [score.fault for score in found.scores if score.better(found.acceptance_length)]
    found.modes = {name: _mean(probe.accepted(base, rows)) for name, rows in modes.items()}
    if len(texts) >= FEW:
        _judge_modes(found)
    if best is not None:
        found.mended = best[1].config if known and not best[1].shifted and not best[1].normed else None
    if found.faults:
        found.verdict = "fault"
    elif found.acceptance_length < HARDLY or len(texts) < FEW:
        found.verdict = "undecided"
    yield len(others), found


def _settled(
    doubt: Doubt, config: DFlashConfig, probe: "_Probe", texts: Sequence[tuple[list[int], int]], found: Diagnosis
) -> DFlashConfig:
    """The meaning of a file that leaves its window open, which all other readings are then compared with; notes the fault."""
    full = probe.accepted(Reading("full attention", "", config), texts)
    longest = max(len(ids) for ids, _ in texts)

    def against(other: DFlashConfig) -> Score:
        return _scored(probe, Reading("", "", other), texts, full)

    if doubt.meant is not None:
        score = against(doubt.meant)
        told = "fits better" if score.low > 0 else "fits as well here"
        if score.high < 0:
            told = "does not fit: full attention is better"
        found.faults.append(f"{doubt.sentence}; the window that it names {told}")
        found.mended = doubt.meant if score.high >= 0 else config
        return found.mended
    seen = [window for window in doubt.tried if window < longest]
    unseen = [window for window in doubt.tried if window >= longest][:1]  # all of these are one and the same here
    scores = {window: against(doubt.tried[window]) for window in (*seen, *unseen)}
    window = max(scores, key=lambda window: scores[window].difference)
    if not scores[window].better(_mean(full)):
        found.faults.append(f"{doubt.sentence}; no window that was tried fits better than full attention, so it is for you to say")
        return config
    if window in unseen:
        size = f"longer than the {longest} tokens of these texts, so it is for you to say"
        found.faults.append(f"{doubt.sentence}; its sliding layers are causal, as usual, and their window is {size}")
    else:
        found.faults.append(f"{doubt.sentence}; {window} tokens fit best of those tried")
        found.mended = doubt.tried[window]
    return doubt.tried[window]


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


def _static(network: DFlash, target: Target, folder: Path | None, found: Diagnosis) -> bool:
    """What shapes and names tell; True: nothing can be run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_pair(network, target, str(folder or "given"))
        except UsageError as error:
            last = len(target.layers) - 1
            if list(network.config.taps)[-1:] != [last]:
                found.faults.append(str(error))
                return True
            found.notes.append(f"it taps layer {last}, the target's last, which readers see before or behind the final norm")
    found.notes += [str(warning.message) for warning in caught]
    if network.config.selector is not None:
        found.notes.append("it is a DFlash 2: it is scored by its slots alone, without its selector")
    who = folder / "target.json" if folder is not None else None
    if who is not None and who.exists():
        try:
            wanted = json.loads(who.read_text())["weights_sha256"]
        except (ValueError, KeyError, TypeError):
            found.notes.append(f"{who} is damaged: which weights it was trained for is unknown")
            wanted = None
        have = digest_of(target)
        if wanted and have and wanted != have:
            found.faults.append("the target's weights are not those it was trained for (target.json): other or quantised")
    else:
        found.notes.append("nothing says which weights it was trained for, so another revision of the target would stay unseen")
    return False


def _continuations(
    target: Target, conversations: Sequence[Sequence[Message]], anchors: int
) -> tuple[list[tuple[list[int], int]], dict[str, list[tuple[list[int], int]]]]:
    """What the target says: ids and where the answer starts, until there are enough; and shorter ones in other modes."""
    texts: list[tuple[list[int], int]] = []
    plain = not getattr(target.tokenizer, "chat_template", None)  # a base model continues text
    usual = partial(_encoded, target, raw=plain)
    pending = [list(conversation) for conversation in conversations]
    while pending and sum(len(ids) - start - 1 for ids, start in texts) < anchors:
        some, pending = pending[:16], pending[16:]
        texts += _answers(target, usual(some))
    few = [list(conversation) for conversation in conversations[:12]]
    modes = {"no template" if plain else "chat template": _answers(target, usual(few))}
    if not plain:
        modes["no template"] = _answers(target, _encoded(target, few, raw=True))
        if "enable_thinking" in str(getattr(target.tokenizer, "chat_template", "")):
            for name, thinking in (("thinking", True), ("no thinking", False)):
                modes[name] = _answers(target, _encoded(target, few, thinking=thinking))
    return texts, {name: rows for name, rows in modes.items() if rows}


def _encoded(
    target: Target, conversations: Sequence[Sequence[Message]], raw: bool = False, thinking: bool | None = None
) -> list[list[int]]:
    """Prompts that leave room for an answer; ``raw``: the last message as plain text."""
    asked = [conversation[-1]["content"] if raw else conversation for conversation in conversations]
    prompts = [encode(target, prompt, raw=raw, thinking=thinking) for prompt in asked]
    return [ids for ids in prompts if len(ids) + TOKENS < target.context]


def _answers(target: Target, prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    params = SamplingParams(max_new_tokens=TOKENS)
    requests = [Request(prompt, params, target, detokenize=False) for prompt in prompts]
    for _ in decode(target, None, requests, 16):
        pass
    return [([*request.prompt, *request.output], len(request.prompt)) for request in requests if len(request.output) > 1]


class _Probe:
    """Runs readings over texts: all anchors of an answer in one forward pass, as in training."""

    def __init__(self, network: DFlash, target: Target, words: Tensor | None):
        self.target, self.state = target, network.state_dict()
        head = target.head
        self.words = Shortlist.of(words, head) if words is not None and isinstance(head, nn.Linear) else None
        self._features: dict[int, dict[int, Tensor]] = {}

    def accepted(self, reading: Reading, texts: Sequence[tuple[list[int], int]]) -> list[Tensor]:
        """For each text, how many tokens a round at each of its anchors would emit, float64 ``[anchors]``."""
        network = DFlash(reading.config)
        network.load_state_dict(self.state)
        blocks = Blocks(network.to(self.target.device, self.target.dtype)).eval()
        return [self._of(blocks, reading, ids, start) for ids, start in texts]

    def _of(self, blocks: Blocks, reading: Reading, ids: list[int], start: int) -> Tensor:
        target, width = self.target, reading.config.block_size
        row = torch.tensor([ids], device=target.device)
        anchors = torch.arange(start, len(ids) - 1, device=target.device)[None]
        positions = torch.arange(len(ids), device=target.device)[None]
        with torch.inference_mode():
            features = self._read(row, reading)
            embeddings = block_embeddings(blocks.network, target.embed, row, anchors, width).to(target.dtype)
            hidden = blocks(embeddings, features, anchors, positions, torch.zeros_like(positions), width)[0]
            hidden = hidden[:, :-1] if reading.shifted else hidden[:, 1:]
            best = (
                target.head(hidden).argmax(dim=-1) if self.words is None else self.words.ids[self.words.logits(hidden).argmax(-1)]
            )
        index = anchors[0, :, None] + torch.arange(1, width, device=target.device)
        right = (best == row[0][index.clamp(max=len(ids) - 1)]) & (index < len(ids))
        return 1 + right.long().cumprod(dim=1).sum(dim=1).double().cpu()

    def _read(self, row: Tensor, reading: Reading) -> Tensor:
        """Features of a text, each layer computed once for all readings."""
        key = hash(tuple(row[0].tolist()))
        known = self._features.setdefault(key, {})
        wanted = [tap for tap in reading.config.taps if tap not in known]
        if wanted:
            found, last = self.target.read(row, wanted)
            known |= dict(zip(wanted, found.split(self.target.hidden_size, dim=-1), strict=True)) | {-1: last}
        pieces = [known[tap] for tap in reading.config.taps]
        if reading.normed:
            pieces[-1] = known[-1]
        return torch.cat(pieces, dim=-1)


def _mean(rows: Sequence[Tensor]) -> float:
    return float(torch.cat(list(rows)).mean()) if rows else 0.0


def _scored(probe: _Probe, reading: Reading, texts: Sequence[tuple[list[int], int]], plain: Sequence[Tensor]) -> Score:
    """On all texts, or on as many as it takes to see that it is worse."""
    other: list[Tensor] = []
    score = None
    for start in range(0, len(texts), 8):
        other += probe.accepted(reading, texts[start : start + 8])
        score = _compared(reading, other, plain[: len(other)])
        if score.high < 0:
            break
    assert score is not None
    return score


def _compared(reading: Reading, other: Sequence[Tensor], plain: Sequence[Tensor]) -> Score:
    """Paired by anchor; anchors of one conversation hang together, so the error is that of conversations."""
    sums = torch.stack([(a - b).sum() for a, b in zip(other, plain, strict=True)])
    counts = torch.tensor([len(row) for row in plain], dtype=torch.float64)
    difference = float(sums.sum() / counts.sum())
    spread = sums - difference * counts
    few = len(counts) / max(1, len(counts) - 1)
    error = float((few * spread.square().sum()).sqrt() / counts.sum())
    margin = _quantile(len(counts) - 1) * error if len(counts) > 1 else math.inf
    return Score(reading.name, reading.fault, int(counts.sum()), _mean(other), difference, difference - margin, difference + margin)


def _quantile(freedom: int) -> float:
    """Of Student's t, where that of the normal law is SURE (Cornish-Fisher)."""
    z = SURE
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _judge_modes(found: Diagnosis) -> None:
    usual = found.modes.get("chat template")
    if usual is None:
        return
    for name, length in found.modes.items():
        if length - 1 > MODE * max(usual - 1, 0.05) and length - usual > 0.2:
            found.faults.append(
                f"it accepts {length:.2f} tokens a round with {name} and {usual:.2f} with the chat template as it is used: "
                "it was probably trained on the former"
            )
