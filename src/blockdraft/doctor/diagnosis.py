"""Doctor: why a target and a drafter do not fit, found by reading the drafter in every way it could have been meant.

A wrong layer offset or slot convention loads without a word and only costs acceptance, a few per cent at times. So every other
reading is scored on the same anchors of the target's own continuations, and the differences are judged conversation by
conversation: what is better beyond doubt is named, the best first. A reading that is worse beyond doubt is soon dropped.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.doctor.readings import Reading, readings
from blockdraft.doctor.scoring import Probe, Score, mean, scored
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.drafters.pairing import check_pair
from blockdraft.drafters.shortlist import read_shortlist
from blockdraft.errors import UsageError
from blockdraft.load import digest_of
from blockdraft.prompts import Message, encode
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target

ANCHORS = 2000  # fewer cannot show a difference of a few per cent
TOKENS = 96  # of a continuation
FEW = 10  # conversations below which nothing can be told from chance
HARDLY = 1.1  # an acceptance length below which nothing works
MODE = 1.5  # how much more must be accepted in another mode of the template to be called a fault: texts differ in how easy they are


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
    probe = Probe(network, target, read_shortlist(folder, target.vocab_size) if folder is not None and folder.is_dir() else None)
    config = network.config if doubt is None else _settled(doubt, network.config, probe, texts, found)
    base = Reading("as configured", "", config)
    plain = probe.accepted(base, texts)
    known = doubt is None or found.mended is not None
    found.acceptance_length, found.anchors = mean(plain), sum(len(row) for row in plain)
    found.conversations = len(texts)
    if found.anchors < anchors:
        found.notes.append(f"only {found.anchors} anchors: a wrong layer offset could stay unseen; give more prompts with --probe")
    others = list(readings(config, target, max(len(ids) for ids, _ in texts)))
    best: tuple[Score, Reading] | None = None
    for number, other in enumerate(others, 1):
        score = scored(probe, other, texts, plain)
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
    found.modes = {name: mean(probe.accepted(base, rows)) for name, rows in modes.items()}
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
    doubt: Doubt, config: DFlashConfig, probe: "Probe", texts: Sequence[tuple[list[int], int]], found: Diagnosis
) -> DFlashConfig:
    """The meaning of a file that leaves its window open, which all other readings are then compared with; notes the fault."""
    full = probe.accepted(Reading("full attention", "", config), texts)
    longest = max(len(ids) for ids, _ in texts)

    def against(other: DFlashConfig) -> Score:
        return scored(probe, Reading("", "", other), texts, full)

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
    if not scores[window].better(mean(full)):
        found.faults.append(f"{doubt.sentence}; no window that was tried fits better than full attention, so it is for you to say")
        return config
    if window in unseen:
        size = f"longer than the {longest} tokens of these texts, so it is for you to say"
        found.faults.append(f"{doubt.sentence}; its sliding layers are causal, as usual, and their window is {size}")
    else:
        found.faults.append(f"{doubt.sentence}; {window} tokens fit best of those tried")
        found.mended = doubt.tried[window]
    return doubt.tried[window]


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
