"""Proof that a pair is lossless on this machine: identical tokens, or the near tie that excuses one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Drafter
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import Sampler, SamplingParams
from blockdraft.targets.target import Target

LIKELY = 16  # rounding noise is measured on this many of the best logits of each position
TIE = 1e-4  # two choices whose scores are closer than this in fp32 may fall either way


@dataclass
class Verdict:
    """What was compared and what came out.

    Attributes:
        rule: "identical" (fp32, and exact targets) or "epsilon" (narrower dtypes).
        prompts, tokens: compared.
        identical: prompts whose output equals the reference to the last token.
        ties: prompts that part at a near tie, as (prompt, position, reference token, token, gap).
        failures: prompts that part elsewhere, or tokens below epsilon, in the same form.
        epsilon: the largest gap to the best logit that rounding explains; None for "identical".
        flips: tokens that are not the teacher-forced argmax, all within epsilon; None for "identical".
        rounds, acceptance_length: of the drafted runs.
    """

    rule: str
    prompts: int = 0
    tokens: int = 0
    identical: int = 0
    ties: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    failures: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    epsilon: float | None = None
    flips: int | None = None
    rounds: int = 0
    acceptance_length: float | None = None

    @property
    def lossless(self) -> bool:
        """No failure, something drafted, and near ties as rare as rounding makes them: one in twenty prompts at most."""
        return not self.failures and self.rounds > 0 and len(self.ties) <= max(1, self.prompts // 20)


def verify_pair(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    block_size: int | None = None,
) -> Iterator[Verdict]:
    """Decode every prompt with the drafter and hold the output against the target alone.

    In float32 the tokens must be those of ``transformers.generate`` (greedy) or of seeded autoregressive decoding (sampled), for an
    exact target in a narrower dtype those of autoregressive decoding.
    In narrower dtypes every token must be within epsilon of the target's best logit under teacher forcing; epsilon is the
    noise measured between one-row and block-wide passes over the same tokens, in the gap of a likely token to the best one.

    Yields:
        The verdict so far, after each prompt.
    """
    exact = target.dtype == torch.float32 or target.exact
    verdict = Verdict("identical" if exact else "epsilon", flips=None if exact else 0)
    drafted_tokens = 0
    for index, prompt in enumerate(prompts):
        request = Request(prompt, params, target)
        for _ in decode(target, drafter, [request], 1, block_size):
            pass
        theirs = params.greedy and not (exact and target.dtype != torch.float32)
        reference = greedy_reference(target, prompt, params) if theirs else own_reference(target, prompt, params)
        verdict.prompts += 1
        verdict.tokens += len(request.output)
        verdict.rounds += request.rounds
        drafted_tokens += max(0, len(request.output) - 1)
        verdict.acceptance_length = drafted_tokens / verdict.rounds if verdict.rounds else None
        verdict.identical += request.output == reference
        if exact and request.output != reference:
            place = first_difference(target, prompt, reference, request.output, params)
            (verdict.ties if place[-1] < TIE else verdict.failures).append((index, *place))
        if not exact:
            _hold_to_epsilon(verdict, target, index, prompt, request.output, block_size or drafter.block_size)
        yield verdict


def greedy_reference(target: Target, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What ``transformers.generate`` says, with its own cache and attention."""
    ids = torch.tensor([list(prompt)], device=target.device)
    limit = min(params.max_new_tokens, target.context - len(prompt))
    options: dict[str, object] = {"eos_token_id": None} if params.ignore_eos else {"eos_token_id": list(target.end_tokens) or None}
    options["repetition_penalty"] = params.repetition_penalty  # said always: a model's own generation config may have another
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, pad_token_id=0, **options
    )
    return output[0, len(prompt) :].tolist()


def own_reference(target: Target, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Autoregressive decoding with this engine, with the same seed."""
    request = Request(prompt, params, target)
    for _ in decode(target, None, [request]):
        pass
    return request.output


def first_difference(
    target: Target, prompt: Sequence[int], reference: Sequence[int], output: Sequence[int], params: SamplingParams
) -> tuple[int, int, int, float]:
    """Position, both tokens (-1: ended), and the gap of their scores there (with their noise, if sampled): 0 is a tie."""
    at = next((i for i, (a, b) in enumerate(zip(reference, output, strict=False)) if a != b), min(len(reference), len(output)))
    a, b = (answer[at] if at < len(answer) else -1 for answer in (reference, output))
    if -1 in (a, b):
        return at, a, b, float("inf")
    prefix = [*prompt, *reference[:at]]
    sampler = Sampler(params, 0, target.device)
    scores = sampler.scores(_next_logits(target, prefix), prefix)
    if params.greedy:
        return at, a, b, abs(float(scores[a] - scores[b]))
    perturbed = sampler.perturbed(scores, len(prefix))
    return at, a, b, abs(float(perturbed[a] - perturbed[b]))


def is_tie(target: Target, prompt: Sequence[int], reference: Sequence[int], output: Sequence[int]) -> bool:
    """True if two greedy outputs part where the two best logits are closer than ``TIE``."""
    return first_difference(target, prompt, reference, output, SamplingParams())[-1] < TIE


def explain_difference(target: Target, prompt: Sequence[int], reference: Sequence[int], output: Sequence[int]) -> str:
    """In words: where two greedy outputs part, the two tokens, and the gap of their logits."""
    at, a, b, gap = first_difference(target, prompt, reference, output, SamplingParams())
    assert target.tokenizer is not None
    words = [repr(target.tokenizer.decode([token])) if token >= 0 else "the end" for token in (a, b)]
    why = "a near tie that rounding decides" if gap < (TIE if target.dtype == torch.float32 else 1.0) else "no tie"
    return f"they part at token {at}, {words[0]} against {words[1]}, whose logits differ by {gap:.3g}: {why}"


def teacher_forced(target: Target, ids: Sequence[int], start: int, width: int) -> Tensor:
    """Logits ``[len(ids) - start, vocabulary]`` that choose ``ids[start:]``, from passes of ``width`` rows.

    ``width`` 1 steps token by token, as autoregressive decoding does; wider passes are what verification runs.
    """
    cache = target.new_cache(1, len(ids) + width)
    logits = []
    for last, _ in target.prefill(cache, 0, ids[:start]):
        logits = [last[None]]
    for at in range(start, len(ids) - 1, width):
        block = torch.tensor([list(ids[at : min(at + width, len(ids) - 1)])], device=target.device)
        if width == 1:
            logits.append(target.step(cache, block[0]))
            continue
        verified, _ = target.verify(cache, block[:, 0], Proposal(block[:, 1:], [block.shape[1]]))
        target.commit(cache, [range(block.shape[1])])
        logits.append(verified[0])
    return torch.cat(logits).float()


def _hold_to_epsilon(
    verdict: Verdict, target: Target, index: int, prompt: Sequence[int], output: Sequence[int], width: int
) -> None:
    ids = [*prompt, *output]
    one, block = (teacher_forced(target, ids, len(prompt), rows) for rows in (1, width))
    likely = one.topk(min(LIKELY, one.shape[-1]), dim=-1).indices
    gaps = [logits.gather(1, likely[:, :1]) - logits.gather(1, likely) for logits in (one, block)]
    verdict.epsilon = max(verdict.epsilon or 0.0, float((gaps[0] - gaps[1]).abs().max()))
    below = gaps_to_best(one, output)
    verdict.flips = (verdict.flips or 0) + int((below > 0).sum())
    for at in (below > verdict.epsilon).nonzero()[:, 0].tolist():
        verdict.failures.append((index, at, int(one[at].argmax()), output[at], float(below[at])))


def gaps_to_best(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """For each row of ``logits [n, vocabulary]``: how far the token's logit is below the largest."""
    chosen = torch.tensor(list(tokens), device=logits.device)
    return logits.max(dim=-1).values - logits.gather(1, chosen[:, None])[:, 0]


def _next_logits(target: Target, ids: Sequence[int]) -> Tensor:
    logits = None
    for logits, _ in target.prefill(target.new_cache(1, len(ids)), 0, ids):
        pass
    assert logits is not None
    return logits
