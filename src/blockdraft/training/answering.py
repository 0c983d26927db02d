"""The batched generator: asks the target, keeps what it says. Every slot is refilled as soon as its answer ends."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from blockdraft.decode import Decoder
from blockdraft.prompts import encode
from blockdraft.request import Request
from blockdraft.sampling import SamplingParams
from blockdraft.target import Target
from blockdraft.training.corpus import Corpus, Row, written_key
from blockdraft.training.synthesis import loop_share, loops, normalised, opening_of, user_header

MESSAGE_TOKENS = (4, 160)  # a self-written message of fewer or more tokens is no usual request
PROMPTS_OF_A_PASS = 8  # one pass over several prompts costs less than one each; waiting for as many free slots costs little
LOOP_LIMIT = 0.25  # a message that repeats more than this share of its 8-grams is dropped
LOOP_CHECK = 16  # tokens between looks for a loop
WINDOW = 256  # questions that are put in order of length, so that prompts of one pass are of like length


@dataclass(frozen=True)
class Question:
    """Something to ask: a key that is unique in the corpus, the kind it counts as, prompt ids, and the prompt's licence."""

    key: str
    source: str
    prompt: list[int]
    licence: str = "the target's"


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        answers, tokens: kept.
        looped: cut where they had begun to loop.
        dropped: what was not kept, by reason.
        slot_steps, answer_steps: slots of all passes, and those that gave a token.
        began: the clock at the start of the run.
    """

    answers: int = 0
    tokens: int = 0
    looped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    slot_steps: int = 0
    answer_steps: int = 0
    began: float = field(default_factory=time.perf_counter)

    def rate(self) -> str:
        """Tokens kept per second since the start."""
        return f"{self.tokens / (time.perf_counter() - self.began):.0f} tokens/s"

    def summary(self) -> str:
        """One line."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "nothing"
        busy = f"{100 * self.answer_steps / self.slot_steps:.0f} % of slot-steps gave a token; " if self.slot_steps else ""
        kept = f"{self.answers} answers ({self.looped} cut at a loop), {self.tokens} tokens, {self.rate()}"
        return f"{kept}; {busy}dropped: {dropped}"


def in_slots(
    target: Target, jobs: Iterator[tuple[Request, Callable[[Request], None]]], slots: int, capacity: int, tally: Tally
) -> Iterator[None]:
    """Run requests over ``slots`` rows; each is handed to its callback when it ends. Yields after every pass."""
    decoder = Decoder(target, None, slots, capacity)
    callbacks: dict[int, Callable[[Request], None]] = {}
    together = max(1, min(PROMPTS_OF_A_PASS, slots // 8))
    ended = False
    while not ended or decoder.active:
        free = slots - len(decoder.active)
        if not ended and (free >= together or not decoder.active):
            admitted = list(itertools.islice(jobs, together))
            ended = len(admitted) < together
            callbacks |= {id(request): callback for request, callback in admitted}
            moved = decoder.admit_all([request for request, _ in admitted])
        else:
            tally.slot_steps += slots
            moved = decoder.round()
            tally.answer_steps += len(moved.emitted)
        for request, _ in moved.emitted:
            if request.finish_reason is None and len(request.output) % LOOP_CHECK == 0 and loops(request.output):
                request.interrupt()
                tally.looped += 1
            if request.finish_reason is not None:
                callbacks.pop(id(request))(request)
        decoder.retire()
        yield


def answer(
    target: Target,
    corpus: Corpus,
    questions: Iterator[Question],
    params: SamplingParams,
    slots: int,
    context: int,
    tally: Tally,
) -> Iterator[None]:
    """Answer what the corpus does not hold yet; yields after every pass."""

    def keep(question: Question) -> Callable[[Request], None]:
        def store(request: Request) -> None:
            row = Row(question.key, question.source, question.prompt, request.output, request.finish_reason == "stop")
            corpus.add(row, question.licence)
            tally.answers += 1
            tally.tokens += len(request.output)

        return store

    def jobs() -> Iterator[tuple[Request, Callable[[Request], None]]]:
        numbered = enumerate(questions)
        while window := sorted(itertools.islice(numbered, WINDOW), key=lambda entry: len(entry[1].prompt)):
            for number, question in window:
                if question.key in corpus.keys:
                    continue
                if len(question.prompt) >= context - 8:
                    tally.dropped["prompts too long"] += 1
                    continue
                yield Request(question.prompt, params, target, number, context, detokenize=False), keep(question)

    yield from in_slots(target, jobs(), slots, context + 1, tally)


def write_messages(
    target: Target,
    kinds: list[str],
    numbers: range,
    seed: int,
    slots: int,
    known: set[str],
    answered: set[str],
    tally: Tally,
    thinking: bool | None = None,
) -> list[Question]:
    """Let the target write users' messages; near-duplicates and oddities are dropped, and counted.

    Args:
        numbers: of the messages: with the seed they decide kind, opening and noise.
        known: normalised texts that are there already; grows.
        answered: keys that need no message any more.
    """
    tokenizer = target.tokenizer
    assert tokenizer is not None
    header = user_header(target)
    params = SamplingParams(max_new_tokens=MESSAGE_TOKENS[1], temperature=1.0, top_p=0.95, seed=seed)
    made: dict[int, Question] = {}

    def take(number: int, kind: str, opening: list[int]) -> Callable[[Request], None]:
        def check(request: Request) -> None:
            ids = [*opening, *request.output[:-1]]
            text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
            fault = message_fault(ids, normalised(text), request.finish_reason == "stop", known)
            if fault:
                tally.dropped[fault] += 1
                return
            known.add(normalised(text))
            made[number] = Question(written_key(seed, number), kind, encode(target, text, thinking=thinking))

        return check

    def jobs() -> Iterator[tuple[Request, Callable[[Request], None]]]:
        for number in numbers:
            if written_key(seed, number) in answered:
                continue
            kind, phrase = opening_of(kinds, seed, number)
            opening = list(tokenizer(phrase, add_special_tokens=False)["input_ids"]) if phrase else []
            request = Request([*header, *opening], params, target, number, detokenize=False)
            yield request, take(number, kind, opening)

    for _ in in_slots(target, jobs(), slots, len(header) + MESSAGE_TOKENS[1] + 32, Tally()):
        pass
    return [made[number] for number in sorted(made)]


def message_fault(ids: list[int], text: str, ended: bool, known: set[str]) -> str | None:
    """Why a self-written message is of no use, or None."""
    if not ended:
        return "messages without an end"
    if len(ids) < MESSAGE_TOKENS[0] or not text:
        return "messages too short"
    if loop_share(ids) > LOOP_LIMIT:
        return "messages that loop"
    return "messages written before" if text in known else None
