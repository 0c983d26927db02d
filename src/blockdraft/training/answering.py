"""The batched generator: asks the target, keeps what it says. Every slot is refilled as soon as its answer ends."""

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
from blockdraft.training.synthesis import loop_share, normalised, opening_of, user_header

MESSAGE_TOKENS = (4, 160)  # a self-written message of fewer or more tokens is no usual request
LOOP_LIMIT = 0.5  # an answer that repeats more than this share of its 8-grams is dropped


@dataclass(frozen=True)
class Question:
    """Something to ask: a key that is unique in the corpus, the kind it counts as, and prompt ids."""

    key: str
    source: str
    prompt: list[int]


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        answers, tokens: kept.
        dropped: what was not, by reason.
        slot_steps, answer_steps: slots of all passes, and those that gave a token.
        began: the clock at the start of the run.
    """

    answers: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    slot_steps: int = 0
    answer_steps: int = 0
    began: float = field(default_factory=time.perf_counter)

    def summary(self) -> str:
        """One line."""
        seconds = time.perf_counter() - self.began
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "nothing"
        busy = f"{100 * self.answer_steps / self.slot_steps:.0f} % of slot-steps gave a token; " if self.slot_steps else ""
        return f"{self.answers} answers, {self.tokens} tokens, {self.tokens / seconds:.0f} tokens/s; {busy}dropped: {dropped}"


def in_slots(
    target: Target, jobs: Iterator[tuple[Request, Callable[[Request], None]]], slots: int, capacity: int, tally: Tally
) -> Iterator[None]:
    """Run requests over ``slots`` rows; each is handed to its callback when it ends. Yields after every pass."""
    decoder = Decoder(target, None, slots, capacity)
    callbacks: dict[int, Callable[[Request], None]] = {}
    waiting: tuple[Request, Callable[[Request], None]] | None = next(jobs, None)
    while waiting is not None or decoder.active:
        if waiting is not None and len(decoder.active) < slots:
            request, callback = waiting
            callbacks[id(request)] = callback
            moved = decoder.admit(request)
            waiting = next(jobs, None)
        else:
            tally.slot_steps += slots
            moved = decoder.round()
            tally.answer_steps += len(moved.emitted)
        for request, _ in moved.emitted:
            if request.finish_reason is not None:
                callbacks.pop(id(request))(request)
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
            if loop_share(request.output) > LOOP_LIMIT:
                tally.dropped["answers that loop"] += 1
                return
            corpus.add(Row(question.key, question.source, question.prompt, request.output, request.finish_reason == "stop"))
            tally.answers += 1
            tally.tokens += len(request.output)

        return store

    def jobs() -> Iterator[tuple[Request, Callable[[Request], None]]]:
        for number, question in enumerate(questions):
            if question.key in corpus.keys:
                continue
            if len(question.prompt) >= context - 8:
                tally.dropped["prompts too long"] += 1
                continue
            yield Request(question.prompt, params, target, number, context, detokenize=False), keep(question)

    yield from in_slots(target, jobs(), slots, context + 1, tally)


def write_messages(
    target: Target, kinds: list[str], numbers: range, seed: int, slots: int, known: set[str], answered: set[str], tally: Tally
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
            made[number] = Question(written_key(seed, number), kind, encode(target, text))

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
    if loop_share(ids) > LOOP_LIMIT / 2:
        return "messages that loop"
    return "messages written before" if text in known else None
