"""The batched generator: asks the target, keeps what it says. Every slot is refilled as soon as its answer ends."""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from blockdraft.decoding.decode import Decoder
from blockdraft.decoding.request import Request
from blockdraft.engine.memory import keep_freed_memory
from blockdraft.prompts import encode
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.data.corpus import Corpus, Row, written_key
from blockdraft.training.data.questions import normalised
from blockdraft.training.data.synthesis import loop_share, loops, message_text, opening_of, user_frame

MESSAGE_TOKENS = (4, 160)  # a self-written message of fewer or more tokens is no usual request
MESSAGE_MIN_P = 0.02  # a message's tokens are drawn from those of at least this share of the best one's probability
PROMPTS_OF_A_PASS = 8  # one pass over several prompts costs less than one each; waiting for as many free slots costs little
LOOP_LIMIT = 0.25  # a message that repeats more than this share of its 8-grams is dropped
LOOP_CHECK = 16  # tokens between looks for a loop
SAME = 200  # characters of self-written messages that are compared: how they go on is often chance
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
        slot_steps, token_steps: slots of all passes, and those that gave a token, of a message or an answer.
        began: the clock at the start of the run.
    """

    answers: int = 0
    tokens: int = 0
    looped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    slot_steps: int = 0
    token_steps: int = 0
    began: float = field(default_factory=time.perf_counter)

    def rate(self) -> str:
        """Tokens kept per second since the start."""
        return f"{self.tokens / (time.perf_counter() - self.began):.0f} tokens/s"

    def summary(self) -> str:
        """One line."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "nothing"
        busy = ""
        if self.slot_steps:
            shares = (100 * count / self.slot_steps for count in (self.token_steps, self.tokens))
            busy = "{:.0f} % of slot-steps gave a token, {:.0f} % one of an answer; ".format(*shares)
        kept = f"{self.answers} answers ({self.looped} cut at a loop), {self.tokens} tokens, {self.rate()}"
        return f"{kept}; {busy}dropped: {dropped}"


Job = tuple[Request, Callable[[Request], None]]


def in_slots(target: Target, pull: Callable[[], Job | None], slots: int, capacity: int, tally: Tally) -> Iterator[None]:
    """Run requests over ``slots`` rows; each is handed to its callback when it ends. Yields after every pass.

    Args:
        pull: the next job; None if there is none now. What ends may bring new ones.
    """
    keep_freed_memory()
    decoder = Decoder(target, None, slots, capacity)
    callbacks: dict[int, Callable[[Request], None]] = {}
    together = max(1, min(PROMPTS_OF_A_PASS, slots // 8))
    while True:
        free = slots - len(decoder.active)
        wanted = min(together, free) if free >= together or not decoder.active else 0
        admitted = [job for job in (pull() for _ in range(wanted)) if job is not None]
        if admitted:
            callbacks |= {id(request): callback for request, callback in admitted}
            moved = decoder.admit_all([request for request, _ in admitted])
        elif decoder.active:
            tally.slot_steps += slots
            moved = decoder.round()
            tally.token_steps += len(moved.emitted)
        else:
            return
        for request, _ in moved.emitted:
            if request.finish_reason is None and len(request.output) % LOOP_CHECK == 0 and loops(request.output):
                request.interrupt()
            if request.finish_reason is not None:
                callbacks.pop(id(request))(request)
        decoder.retire()
        yield


@dataclass
class Answering:
    """Asking a target: what its answers share.

    Attributes:
        context: most tokens of a conversation.
        slots: requests in flight.
    """

    target: Target
    corpus: Corpus
    params: SamplingParams
    context: int
    slots: int
    tally: Tally

    def given(self, questions: Iterator[Question]) -> Iterator[None]:
        """Answer what the corpus does not hold yet; yields after every pass."""

        def jobs() -> Iterator[Job]:
            numbered = enumerate(questions)
            while window := sorted(itertools.islice(numbered, WINDOW), key=lambda entry: len(entry[1].prompt)):
                for number, question in window:
                    if question.key not in self.corpus.keys and (job := self._job(question, number)) is not None:
                        yield job

        waiting = jobs()
        yield from in_slots(self.target, lambda: next(waiting, None), self.slots, self.context + 1, self.tally)

    def written(self, kinds: list[str], numbers: range, seed: int, thinking: bool | None = None) -> Iterator[None]:
        """Let the target write users' messages and answer them in the same slots; yields after every pass.

        Args:
            numbers: of the messages: with the seed they decide kind, opening and noise.
        """
        tokenizer, tally = self.target.tokenizer, self.tally
        assert tokenizer is not None
        frame = user_frame(self.target, thinking)
        known = {normalised(message_text(self.target, frame, row.prompt))[:SAME] for row in self.corpus.rows()}
        params = SamplingParams(max_new_tokens=MESSAGE_TOKENS[1], temperature=1.0, min_p=MESSAGE_MIN_P, seed=seed)
        ready: deque[Job] = deque()  # answers, asked several at a time: their prompts are longer than openings of messages
        draining = False

        def take(number: int, kind: str, opening: list[int]) -> Callable[[Request], None]:
            def check(request: Request) -> None:
                ids = [*opening, *request.output[:-1]]
                text = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
                same = normalised(text)[:SAME]
                fault = message_fault(ids, same, request.finish_reason == "stop", known)
                if fault:
                    tally.dropped[fault] += 1
                    return
                known.add(same)
                question = Question(written_key(seed, number), kind, encode(self.target, text, thinking=thinking))
                job = self._job(question, number)
                if job is not None:
                    ready.append(job)

            return check

        def messages() -> Iterator[Job]:
            for number in numbers:
                if written_key(seed, number) in self.corpus.keys:
                    continue
                kind, phrase = opening_of(kinds, seed, number)
                opening = list(tokenizer(phrase, add_special_tokens=False)["input_ids"]) if phrase else []
                request = Request([*frame[0], *opening], params, self.target, number, self.context, detokenize=False)
                yield request, take(number, kind, opening)

        waiting = messages()

        def pull() -> Job | None:
            nonlocal draining
            draining = bool(ready) and (draining or len(ready) >= PROMPTS_OF_A_PASS)
            if not draining and (message := next(waiting, None)) is not None:
                return message
            return ready.popleft() if ready else None

        yield from in_slots(self.target, pull, self.slots, self.context + 1, tally)

    def _job(self, question: Question, number: int) -> Job | None:
        if len(question.prompt) >= self.context - 8:
            self.tally.dropped["prompts too long"] += 1
            return None

        def store(request: Request) -> None:
            row = Row(question.key, question.source, question.prompt, request.output, request.finish_reason == "stop")
            self.corpus.add(row, question.licence)
            self.tally.answers += 1
            self.tally.tokens += len(request.output)
            self.tally.looped += request.finish_reason == "interrupted"

        return Request(question.prompt, self.params, self.target, number, self.context, detokenize=False), store


def message_fault(ids: list[int], text: str, ended: bool, known: set[str]) -> str | None:
    """Why a self-written message is of no use, or None."""
    if not ended:
        return "messages without an end"
    if len(ids) < MESSAGE_TOKENS[0] or not text:
        return "messages too short"
    if loop_share(ids) > LOOP_LIMIT:
        return "messages that loop"
    return "messages written before" if text in known else None
