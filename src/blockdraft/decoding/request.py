"""Request: one prompt on its way to an answer, where it stops, and what it cost."""

from collections.abc import Sequence

import torch

from blockdraft.decoding.text import Detokenizer, StopStrings
from blockdraft.errors import UsageError
from blockdraft.rules.sampling import Sampler, SamplingParams
from blockdraft.targets.target import Target


class Request:
    """A prompt, the tokens emitted for it so far, and why they ended.

    Args:
        prompt: token ids.
        params: of this request.
        target: whose end tokens, context limit and tokenizer apply.
        row: its number in the batch; part of the key of its noise.
        detokenize: False leaves ``text`` empty and saves the time; stop strings need True.
        max_context: a lower limit on prompt and output together than the target's own.

    Attributes:
        output: emitted ids, the end token included.
        text: what they say, cut before a stop string; only if the target has a tokenizer.
        finish_reason: "stop" (end token or stop string), "length" (``max_new_tokens`` or the context), "interrupted", or None.
        rounds: verification passes so far; a step of plain decoding is no round.
        plain_rounds: those of them that had no candidate to verify.
        candidates: verified so far.
        accepted_at: for each slot behind the anchor, the rounds in which its draft stood and was emitted.

    Raises:
        UsageError: an empty prompt, one that leaves no room for a token, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        target: Target,
        row: int = 0,
        max_context: int | None = None,
        detokenize: bool = True,
    ):
        limit = min(target.context, max_context or target.context)
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        if len(prompt) >= limit:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, and the context of {limit} leaves no room for an answer; shorten the prompt"
                + (" or raise --max-context" if limit < target.context else "")
            )
        if min(prompt) < 0 or max(prompt) >= target.embedding.num_embeddings:
            raise UsageError(f"the prompt has token ids outside the target's vocabulary of {target.embedding.num_embeddings}")
        tokenizer = target.tokenizer if detokenize else None
        if params.stop and tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and there is none at work here; use stop_token_ids")
        self.prompt, self.params, self.row = list(prompt), params, row
        self.limit = min(params.max_new_tokens, limit - len(self.prompt))
        self.sampler = Sampler(params, row, torch.device(target.device))
        ends = params.stop_token_ids if params.stop_token_ids is not None else target.end_tokens
        self._ends = frozenset() if params.ignore_eos else frozenset(ends)
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(params.stop)
        self._shown = 0
        self._cut_off = False
        self.output: list[int] = []
        self.text = ""
        self.finish_reason: str | None = "length" if self.limit == 0 else None
        self.block_size = 1  # slots of a block in the rounds, the anchor included
        self.rounds = self.plain_rounds = self.candidates = 0
        self.accepted_at: list[int] = []
        self.prefill_seconds = 0.0  # from the prompt's pass to the first token
        self.decode_seconds = 0.0  # passes since, those that this request waited for included

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def remaining(self) -> int:
        return self.limit - len(self.output)

    def extend(self, tokens: Sequence[int]) -> int:
        """Emit tokens one by one until one of them ends the request; return how many were emitted."""
        for count, token in enumerate(tokens, 1):
            self.output.append(token)
            self._read(token)
            if self.finish_reason is None and self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self._close()
                return count
        return len(tokens)

    def count_round(self, candidates: int, accepted: Sequence[int]) -> None:
        """Book a verification pass over so many candidates, and the depths (1 = behind the anchor) of those that were emitted."""
        self.rounds += 1
        self.candidates += candidates
        self.plain_rounds += candidates == 0
        for depth in accepted:
            self.accepted_at += [0] * (depth - len(self.accepted_at))
            self.accepted_at[depth - 1] += 1

    def interrupt(self) -> None:
        if self.finish_reason is None:
            self.finish_reason = "interrupted"
            self._close()

    def take_text(self) -> str:
        """The text that became certain since the last call: no half characters, nothing that may begin a stop string."""
        upto = len(self.text) if self.finish_reason else self._stops.safe(self.text)
        piece = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return piece

    def _read(self, token: int) -> None:
        if token in self._ends:
            self.finish_reason = "stop"
        if self._detokenizer is None:
            return
        before = len(self.text)
        self.text += self._detokenizer.push(token)
        self._cut(before)

    def _close(self) -> None:
        """At the end, what the detokenizer held back is certain; behind a stop string nothing counts."""
        if self._detokenizer is not None and not self._cut_off:
            before = len(self.text)
            self.text += self._detokenizer.flush()
            self._cut(before)

    def _cut(self, since: int) -> None:
        at = self._stops.find(self.text, since)
        if at is not None:
            self.text = self.text[:at]
            self.finish_reason, self._cut_off = "stop", True
