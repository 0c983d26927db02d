"""Methods: ways to answer a batch of prompts, each timed by the same clock.

ar, dflash, dflash-tree, dflash-tree:N, lookup    this engine (dflash:S: a chain of S denoising steps; dflash-tree:no-copies:
                                                   the tree without earlier text among its branches)
eagle3, eagle3:N, eagle3-tree, eagle3-tree:N,      the same, with an EAGLE-3 drafter (eagle3:N: a chain of N tokens, not 7), or a
draft-model                                        smaller model as drafter
hf, hf-dflash                                      transformers' own ``generate`` over untouched weights
openai:URL                                         any OpenAI-compatible server
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from blockdraft.decoding.decode import Round, decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3Drafter
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.model import ModelDrafter
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.formats.transformers import AssistantDrafter
from blockdraft.generation import with_tree
from blockdraft.load import LoadedDrafter, load_model
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target

NAMES = (
    *("ar", "dflash", "dflash:S", "dflash-tree", "dflash-tree:N", "dflash-tree:no-copies", "lookup"),
    *("eagle3", "eagle3:N", "eagle3-tree", "eagle3-tree:N", "draft-model", "hf", "hf-dflash", "openai:URL"),
)
NO_COPIES = "dflash-tree:no-copies"
EAGLE3_TREE = 59  # candidates of EAGLE-3's tree: 60 tokens with the root


@dataclass
class Answer:
    """One prompt's answer and what it took.

    Attributes:
        ids: emitted tokens.
        text: what they say.
        first_seconds: until the first token, from when the batch began.
        decode_seconds: from the first token to the last.
        wall_seconds: this prompt's share of the time that its batch took to decode; alone, the same.
        waited_seconds: of ``first_seconds``, for the prompts before it in its batch.
        rounds: target passes after the prompt's; 0 where there is no drafter or they cannot be seen.
        plain_rounds: those of them that verified no candidate.
        accepted: drafted tokens emitted in each round.
        round_seconds, draft_seconds, verify_seconds: of its rounds, all in all, in the drafter and in the target; None where they
            cannot be seen: outside this engine, and on devices that work on while Python goes ahead.
    """

    ids: list[int]
    text: str
    first_seconds: float
    decode_seconds: float
    wall_seconds: float
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    round_seconds: float | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    waited_seconds: float = 0.0
    plain_rounds: int = 0

    def took_part(self, accepted: int, round: Round, seen: bool) -> None:
        """Book a round; ``seen``: whether its times are known."""
        self.accepted.append(accepted)
        if seen:
            self.round_seconds = (self.round_seconds or 0.0) + round.seconds
            self.draft_seconds = (self.draft_seconds or 0.0) + round.draft_seconds
            self.verify_seconds = (self.verify_seconds or 0.0) + round.verify_seconds


class Method(Protocol):
    """Answers prompts.

    Attributes:
        drafted: whether rounds mean anything.
        model_bytes: of the target's weights, packed copies included; None: unknown.
        extra_bytes: memory that plain decoding would not need, measured after the last call; None: unknown.
    """

    name: str
    drafted: bool
    model_bytes: int | None
    extra_bytes: int | None

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]: ...


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise UsageError for a name that no method has: before anything large is loaded."""
    for name in names:
        kind, _, detail = name.partition(":")
        fits = (
            bool(detail)
            if kind == "openai"
            else detail.isdecimal() and int(detail) > 0 and kind in ("dflash", "dflash-tree", "eagle3", "eagle3-tree")
            if detail and name != NO_COPIES
            else name in NAMES
        )
        if not fits:
            raise UsageError(f"method {name!r} is unknown; use {', '.join(NAMES)}")


def make_method(name: str, target: Target, drafters: Sequence[LoadedDrafter], model: str) -> Method:
    """A method by name.

    Args:
        target: of this engine.
        drafters: for the methods that need one, at most one of a kind.
        model: where the target's weights lie, for the peers that load their own.

    Raises:
        UsageError: no drafter for it, or nothing to run it with.
    """
    refuse_unknown([name])
    kind, _, detail = name.partition(":")
    if kind == "openai":
        return Server(name, detail, target)
    drafter = next((d for d in drafters if isinstance(d, DFlashDrafter)), None)
    eagle = next((d for d in drafters if isinstance(d, Eagle3Drafter)), None)
    if kind in ("dflash", "dflash-tree", "hf-dflash") and drafter is None:
        raise UsageError(f"method {name} needs a DFlash drafter; give its folder with --drafter")
    if name == "draft-model":
        smaller = next((d for d in drafters if isinstance(d, ModelDrafter)), None)
        if smaller is None:
            raise UsageError("method draft-model needs a smaller language model; give its folder with --drafter")
        return Engine(name, target, smaller)
    if kind in ("eagle3", "eagle3-tree"):
        if eagle is None:
            raise UsageError(f"method {name} needs an EAGLE-3 drafter; give its folder with --drafter")
        if kind == "eagle3-tree":
            return Engine(name, target, with_tree(target, eagle, int(detail or EAGLE3_TREE)))
        if detail and int(detail) >= eagle.block_size:
            raise UsageError(f"method {name}: an EAGLE-3 drafter is made to draft at most {eagle.block_size - 1} tokens in a chain")
        return Engine(name, target, with_tree(target, eagle, "off"), int(detail) + 1 if detail else None)
    if kind == "dflash-tree" and isinstance(drafter, DFlashDrafter) and drafter.config.selector is not None:
        raise UsageError(f"method {name} needs slots that are independent; a DFlash 2 is a chain: measure it as dflash")
    if kind == "dflash" and detail and isinstance(drafter, DFlashDrafter):
        return Engine(name, target, drafter.with_denoising(int(detail)))
    if name in ("ar", "lookup", "dflash", "dflash-tree", NO_COPIES):
        made: Drafter | None = {"ar": None, "lookup": LookupDrafter()}.get(name, drafter)
        made = with_tree(target, made, "auto" if kind == "dflash-tree" else "off", copy=name != NO_COPIES)
        if made is not None and made.method != kind:
            raise UsageError(f"method {name} needs more context than {target.name}'s {target.context} tokens; measure it as dflash")
        return Engine(name, target, made)
    if kind == "dflash-tree":
        return Engine(name, target, with_tree(target, drafter, int(detail)))
    return Transformers(name, target, drafter if name == "hf-dflash" else None, model)


class Engine:
    """This engine, with or without a drafter, which drafts blocks of its own size or of ``block_size``."""

    def __init__(self, name: str, target: Target, drafter: Drafter | None, block_size: int | None = None):
        self.name, self.target, self.drafter, self.block_size = name, target, drafter, block_size
        self.drafted = drafter is not None
        self.model_bytes: int | None = _bytes(target.model) + target.packed_bytes
        self.extra_bytes: int | None = 0

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
        requests = [Request(prompt, params, self.target, row) for row, prompt in enumerate(prompts)]
        answers = {id(request): Answer([], "", 0.0, 0.0, 0.0) for request in requests}
        wall = prompts_seconds = 0.0
        seen = self.target.device.type == "cpu"
        for round in decode(self.target, self.drafter, requests, len(requests), self.block_size):
            if round.prefill:
                for request, _ in round.emitted:
                    answers[id(request)].waited_seconds = prompts_seconds
                prompts_seconds += round.seconds
                continue
            wall += round.seconds
            for (request, _), count in zip(round.emitted, round.accepted, strict=True):
                if self.drafted:
                    answers[id(request)].took_part(count, round, seen)
        if self.drafter is not None:
            self.extra_bytes = self.drafter.bytes()
        for request in requests:
            answer = answers[id(request)]
            answer.ids, answer.text, answer.rounds = list(request.output), request.text, request.rounds
            answer.plain_rounds = request.plain_rounds
            answer.first_seconds = answer.waited_seconds + request.prefill_seconds
            answer.decode_seconds = request.decode_seconds
            answer.wall_seconds = wall / len(requests)
        return list(answers.values())


class Transformers:
    """``generate`` of an untouched transformers model in the target's dtype, plain or with its own DFlash loop."""

    def __init__(self, name: str, target: Target, drafter: DFlashDrafter | None, model: str):
        self.name, self.target, self.drafted = name, target, drafter is not None
        # The weights once more: this engine packs those of its own copy.
        self.model: PreTrainedModel = load_model(model, target.dtype, str(target.device))[0].eval()
        self.model_bytes: int | None = _bytes(self.model)
        self.extra_bytes: int | None = 0
        self.options: dict[str, Any] = {}
        if drafter is not None:
            self.assistant = AssistantDrafter(drafter, self.model)
            self.options = {"assistant_model": self.assistant, "speculation_type": "dflash"}

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
        if len(prompts) > 1:
            raise UsageError(f"{self.name} is measured one prompt at a time; use --batch 1")
        ids = torch.tensor([list(prompts[0])], device=self.target.device)
        clock = _Clock(ids.shape[1])
        how: dict[str, Any] = {"do_sample": False} if params.greedy else _sampled(params)
        ends = None if params.ignore_eos else list(self.target.end_tokens) or None
        if not params.greedy:
            torch.manual_seed(params.seed or 0)
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(params.max_new_tokens, self.target.context - ids.shape[1]),
                eos_token_id=ends,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                repetition_penalty=params.repetition_penalty,  # and not what the model's own generation config may say
                **how,
                **self.options,
            )
        ended = time.perf_counter()
        if self.drafted:
            cache = sum(tensor.numel() * tensor.element_size() for tensor in self.assistant.held)
            self.extra_bytes = _bytes(self.assistant.network) + cache
            self.assistant.held.clear()
        new = out[0, ids.shape[1] :].tolist()
        tokenizer = self.target.tokenizer
        text = str(tokenizer.decode(new, skip_special_tokens=True)) if tokenizer is not None else ""
        first = clock.times[0] if clock.times else ended
        grown = clock.grown[1:] if self.drafted else []
        return [Answer(new, text, first - began, ended - first, ended - first, len(grown), [count - 1 for count in grown])]


def _bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class _Clock(StoppingCriteria):
    """Never stops; notes when tokens arrive, and how many."""

    def __init__(self, prompt: int):
        self.length, self.times, self.grown = prompt, list[float](), list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.grown.append(input_ids.shape[1] - self.length)
        self.length = input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _sampled(params: SamplingParams) -> dict[str, Any]:
    limits = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p or None}
    return {"do_sample": True, "temperature": params.temperature, **limits}


class Server:
    """A server's streamed completions of the prompt's ids. Its tokens are counted with the target's tokenizer."""

    def __init__(self, name: str, url: str, target: Target):
        try:
            import httpx
        except ImportError:
            raise UsageError("openai:URL needs httpx; install it with `pip install blockdraft[data]`") from None
        if target.tokenizer is None:
            raise UsageError("openai:URL needs a target with a tokenizer, to count a server's tokens")
        self.name, self.target, self.drafted = name, target, False
        self.model_bytes: int | None = None
        self.extra_bytes: int | None = None
        base = url.rstrip("/")
        self._http = httpx.Client(base_url=base if base.endswith("/v1") else f"{base}/v1", timeout=600)
        try:
            self.model = self._http.get("/models").raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise UsageError(f"{url} is no OpenAI-compatible server that answers /v1/models ({error})") from error

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
        import httpx

        if len(prompts) > 1:
            raise UsageError(f"{self.name} is measured one prompt at a time; use --batch 1")
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        body = {
            "model": self.model,
            "prompt": list(prompts[0]),  # ids: a server would put its own first token before a text
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stream": True,
            **({"seed": params.seed} if params.seed is not None else {}),
        }
        text, first, ended_itself, began = "", None, False, time.perf_counter()
        try:
            with self._http.stream("POST", "/completions", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice.get("text") or ""
                    ended_itself = ended_itself or choice.get("finish_reason") == "stop"
                    first = first or time.perf_counter()
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise BlockdraftError(f"{self.name} failed: {error}") from error
        ended = time.perf_counter()
        first = first or ended
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ended_itself and self.target.end_tokens:  # the last token that it generated has no text
            own = tokenizer.eos_token_id
            ids.append(own if own in self.target.end_tokens else self.target.end_tokens[0])
        return [Answer(ids, text, first - began, ended - first, ended - first)]
