"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) that serves the target: for large corpora on a cluster.

The server's answers come back as token ids where it offers them (vLLM's ``return_token_ids``), else as text, which the target's
tokenizer turns into ids again; a stop adds the end token that the text does not show.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.data.answering import LOOP_CHECK, Tally
from blockdraft.training.data.corpus import Corpus, Row
from blockdraft.training.data.questions import Given, encoded
from blockdraft.training.data.synthesis import loops

TRIES = 6  # a busy or restarting server is asked again after 1, 2, 4, 8, 16 s
FIRST_WAIT = 1.0


@dataclass
class Endpoint:
    """A server and the model it serves.

    Attributes:
        url: up to and including ``/v1``.
        model: as the server names it; empty: the first of its list.
        key: sent as a bearer token, if not empty.
    """

    url: str
    model: str = ""
    key: str = ""

    async def answer(
        self,
        target: Target,
        corpus: Corpus,
        questions: Sequence[Given],
        params: SamplingParams,
        context: int,
        at_once: int,
        tally: Tally,
    ) -> None:
        """Ask what the corpus does not hold yet, ``at_once`` questions at a time; every answer is stored as it comes.

        Args:
            context: most tokens of a conversation.

        Raises (in an ExceptionGroup, if one of several questions failed):
            UsageError: no server there, or it refuses the request; says what it said.
            BlockdraftError: it failed ``TRIES`` times in a row.
        """
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        gate = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(headers=headers, timeout=600, limits=limits, trust_env=False) as client:
            if not self.model:
                listed = await self._call(client, "GET", "/models", None)
                try:
                    self.model = str((listed or {})["data"][0]["id"])
                except (KeyError, IndexError, TypeError) as error:
                    raise UsageError(f"{self.url}/models lists no model; name one with --endpoint-model") from error

            thinking = corpus.identity.get("thinking")

            async def one(question: Given, prompt: list[int]) -> None:
                if len(prompt) >= context - 8:
                    tally.dropped["prompts too long"] += 1
                    return
                body = self._body(question, params, thinking, context - len(prompt))
                async with gate:
                    found = await self._call(client, "POST", "/chat/completions", body)
                row = None if found is None else self._row(target, question, found, prompt, tally)
                if row is None:
                    tally.dropped["refused by the server" if found is None else "empty answers"] += 1
                    return
                corpus.add(row, question.licence)
                tally.answers += 1
                tally.tokens += len(row.answer)

            async with asyncio.TaskGroup() as group:
                for question, prompt in encoded(questions, target, thinking, tally.dropped):
                    if question.key not in corpus.keys:
                        group.create_task(one(question, prompt))

    def _body(self, question: Given, params: SamplingParams, thinking: bool | None, room: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": question.messages,
            "max_tokens": min(params.max_new_tokens, room),
            "temperature": params.temperature,
            "return_token_ids": True,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return body

    async def _call(self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The server's reply; None if it refuses this one question (status 400)."""
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                response = await client.request(method, self.url.rstrip("/") + path, json=body)
            except httpx.UnsupportedProtocol:
                raise UsageError(f"{self.url!r} is no address of a server; give one like http://127.0.0.1:8000/v1") from None
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                continue
            if response.status_code == 400 and body is not None and "return_token_ids" in body:
                body = {name: value for name, value in body.items() if name != "return_token_ids"}  # a server that knows it not
                continue
            if response.status_code == 400 and body is not None:
                return None
            if response.status_code == 429 or response.status_code >= 500:
                reason = f"status {response.status_code}"
                continue
            if response.status_code != 200:
                raise UsageError(f"{self.url}{path} refuses with status {response.status_code}: {response.text[:200]}")
            try:
                return dict(response.json())
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"{self.url}{path} does not answer with a JSON object ({response.text[:60]!r}); "
                    "is it an OpenAI-compatible server?"
                ) from error
        raise BlockdraftError(f"{self.url}{path} did not answer in {TRIES} tries: {reason}; the same command goes on from there")

    def _row(self, target: Target, question: Given, found: dict[str, Any], prompt: list[int], tally: Tally) -> Row | None:
        """The answer, cut where it has begun to loop as answers made here are; None if it is empty."""
        try:
            choice = found["choices"][0]
            finished, ids = choice["finish_reason"] == "stop", choice.get("token_ids")
            text = "" if ids is not None else choice["message"].get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.url} answers without choices; is it an OpenAI-compatible server?") from error
        if ids is None:
            assert target.tokenizer is not None
            ids = list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
            if finished and target.end_tokens:
                end = target.tokenizer.eos_token_id
                ids.append(end if end in target.end_tokens else target.end_tokens[0])
        looped = next((end for end in range(LOOP_CHECK, len(ids), LOOP_CHECK) if loops(ids[:end])), None)
        tally.looped += looped is not None
        ids, finished = list(ids[:looped]), finished and looped is None
        return Row(question.key, question.source, prompt, ids, finished) if len(ids) > 1 else None
