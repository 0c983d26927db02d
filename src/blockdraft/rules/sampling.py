"""SamplingParams, the distribution they define, and noise that depends on nothing but (seed, row, position)."""

import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockdraft.errors import UsageError

ACCEPTANCE_RULES = ("match", "rejection")
CHOICE, DRAFT, ACCEPT = 0, 1, 2  # streams of noise: the target's choices, the drafter's draws, acceptance


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to end.

    Attributes:
        max_new_tokens: exact upper bound on emitted tokens.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0: all.
        top_p: keep tokens while the mass before them is below p; 1: all.
        min_p: drop tokens below this share of the most probable one; 0: none.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in prompt or output; 1: off.
        seed: of the noise; None draws one, which the result reports. Greedy decoding has no noise.
        stop: strings; the text ends before the first that appears.
        stop_token_ids: end tokens; None: those of the target's generation config.
        ignore_eos: do not stop at end tokens at all.
        acceptance: at temperature > 0, "match" (a greedy draft stands while the target samples the same token; a seed gives
            the same output as without a drafter) or "rejection" (the draft is drawn from the drafter's law and accepted with
            probability min(1, p/q), else redrawn from the residual). Both are exact.
        logits_processors: further transformers processors, applied after the repetition penalty, at each position with that
            position's own prefix. They must not keep state between calls.

    Raises:
        UsageError: a value out of its range; names it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    acceptance: str = "match"
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        checks = (
            (isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 0, "max_new_tokens", "a whole number from 0"),
            (0 <= self.temperature < float("inf"), "temperature", "0 (greedy) or above"),
            (isinstance(self.top_k, int) and self.top_k >= 0, "top_k", "a whole number; 0 keeps all tokens"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
            (0 < self.repetition_penalty < float("inf"), "repetition_penalty", "above 0; 1 is off"),
            (self.acceptance in ACCEPTANCE_RULES, "acceptance", " or ".join(ACCEPTANCE_RULES)),
            (not isinstance(self.stop, str) and all(self.stop), "stop", "a list of strings that are not empty"),
        )
        for valid, name, wanted in checks:
            if not valid:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise UsageError(
                "top_k, top_p and min_p have no effect at temperature 0 (greedy); leave them out or raise the temperature"
            )
        if self.temperature == 0 and self.acceptance == "rejection":
            raise UsageError("the rejection rule needs temperature > 0; a greedy draft of a greedy target has nothing to reject")
        for processor in self.logits_processors:
            if not isinstance(processor, LogitsProcessor):
                raise UsageError(f"{type(processor).__name__} is no transformers LogitsProcessor")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """The distribution of one sequence under its params, and its noise.

    Args:
        params: of the sequence.
        row: number of the sequence in its batch: rows with one seed have different noise.
        device: of the logits.
    """

    def __init__(self, params: SamplingParams, row: int, device: torch.device):
        self.params, self.row, self.device = params, row, device
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.processors = LogitsProcessorList()  # depend on the prefix
        if params.repetition_penalty != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        self.processors.extend(params.logits_processors)
        self.warpers = LogitsProcessorList()  # depend on the scores alone; transformers' order
        if not params.greedy:
            if params.temperature != 1.0:
                self.warpers.append(TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                self.warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                self.warpers.append(TopPLogitsWarper(params.top_p))
            if params.min_p > 0.0:
                self.warpers.append(MinPLogitsWarper(params.min_p))

    @property
    def plain_greedy(self) -> bool:
        """True if a token is nothing but the argmax of its logits."""
        return self.params.greedy and not self.processors

    def scores(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """Logits ``[vocabulary]`` after all processors and warpers, in float32; ``prefix`` is prompt and output so far."""
        scores = logits.float()[None]
        if self.processors:
            ids = torch.tensor([list(prefix)], device=self.device)
            for processor in self.processors:
                scores = _call_stateless(processor, ids, scores.clone())
        return self.warp(scores)[0]

    def warp(self, scores: Tensor) -> Tensor:
        """Temperature, top-k, top-p and min-p over ``[rows, vocabulary]``."""
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores

    def choose(self, logits: Tensor, prefix: Sequence[int]) -> int:
        """The target's token after ``prefix``: the largest score, or drawn with the noise of its position."""
        scores = self.scores(logits, prefix)
        return int(best(scores)) if self.params.greedy else self.drawn(scores, len(prefix))

    def drawn(self, scores: Tensor, position: int) -> int:
        """The first of the largest ``perturbed`` scores, without computing the noise of tokens that cannot have it.

        The noise of a token is -log(-log u). It wins only if that and its score reach what the likeliest token has, its bar; since
        -log u > 1 - u, only where 1 - u < exp(score - bar), which u's bits tell for the whole vocabulary without a logarithm.
        """
        values = scores.float().cpu()
        values = values.masked_fill(~values.isfinite(), float("-inf"))
        likeliest = values.max(dim=-1)
        if not likeliest.values.isfinite():  # everything is forbidden
            return int(likeliest.indices)
        key = self.seed, self.row, position, CHOICE
        bar = float(likeliest.values) + float(counter_gumbel(likeliest.indices.view(1).numpy(), *key)[0])
        slack = 1e-9 + 1e-15 * (abs(bar) + 64)  # rounding, of large scores too, must not leave the winner out
        chances = torch.exp(values.double() - bar).numpy() * (1 + slack)
        candidates = np.flatnonzero(_below_one(_noise_bits(len(values), key)) <= chances)
        perturbed = values.numpy()[candidates].astype(np.float64) + counter_gumbel(candidates, *key)
        return int(candidates[perturbed.argmax()])

    def perturbed(self, scores: Tensor, position: int) -> Tensor:
        """Scores ``[vocabulary]`` plus Gumbel noise of this position, in float64: the largest is a draw from their softmax.

        Each token has its own noise, so rounding of the scores can only swap tokens whose perturbed scores nearly tie.
        (Inverting the cumulative distribution at one number would let every rounding error move every edge behind it.)
        """
        scores = double(scores)
        possible = scores.isfinite().nonzero()[:, 0]
        noise = counter_gumbel(possible.cpu().numpy(), self.seed, self.row, position, CHOICE)
        perturbed = torch.full_like(scores, float("-inf"))
        perturbed[possible] = scores[possible] + torch.from_numpy(noise).to(scores.device)
        return perturbed

    def law(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """Probabilities ``[vocabulary]`` of the token after ``prefix``."""
        return torch.softmax(self.scores(logits, prefix), dim=-1)

    def draw_draft(self, logits: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Draft tokens ``[slots]`` for ``position`` and on, each from its own law, and those laws ``[slots, vocabulary]``."""
        laws = torch.softmax(self.warp(logits.float()), dim=-1)
        tokens = [draw(law, self.uniform(position + i, DRAFT)) for i, law in enumerate(laws)]
        return torch.tensor(tokens, device=logits.device), laws

    def uniform(self, position: int, stream: int = CHOICE) -> float:
        """A number in [0, 1) keyed by (seed, row, position, stream)."""
        return counter_uniform(self.seed, self.row, position, stream)


def best(logits: Tensor) -> Tensor:
    """Argmax over the last dimension, the first of equals; for bfloat16 on CPUs four times faster than ``argmax``."""
    return logits.max(dim=-1).indices


def double(x: Tensor) -> Tensor:
    """In float64; on the CPU where its own device has none (Apple's MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def draw(probabilities: Tensor, uniform: float) -> int:
    """Invert the cumulative distribution ``[vocabulary]`` at ``uniform``; never a token of probability zero."""
    cumulative = double(probabilities).cumsum(-1)
    total = cumulative[-1:]
    index = torch.searchsorted(cumulative, total * uniform, right=True)
    if int(index) >= len(cumulative):  # uniform * total rounded up to total
        index = probabilities.nonzero()[-1]
    return int(index)


def counter_uniform(*key: int) -> float:
    """A uniform number in [0, 1) with 53 bits, a pure function of the key."""
    return (_digest(key) >> 11) * 2.0**-53


def counter_gumbel(tokens: np.ndarray, *key: int) -> np.ndarray:
    """Standard Gumbel noise ``[tokens]`` float64, each a pure function of the key and the token's id."""
    bits = _mix_array(np.uint64(_digest(key)) ^ _mix_array(tokens.astype(np.uint64)))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _noise_bits(vocabulary: int, key: Sequence[int]) -> np.ndarray:
    """What ``counter_gumbel`` makes its numbers of, for all tokens."""
    return _mix_array(np.uint64(_digest(key)) ^ _token_bits(vocabulary))


def _below_one(bits: np.ndarray) -> np.ndarray:
    """1 - u of these bits, or less by a rounding."""
    return (np.uint64(2**53 - 1) - (bits >> np.uint64(11))).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=8)
def _token_bits(vocabulary: int) -> np.ndarray:
    return _mix_array(np.arange(vocabulary, dtype=np.uint64))


_MASK = (1 << 64) - 1


def _digest(key: Sequence[int]) -> int:
    """64 bits of a key of any integers: SplitMix64's finaliser, chained."""
    state = 0
    for part in key:
        state = _mix(state ^ (part & _MASK))
    return state


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """``_mix`` over uint64, whose arithmetic wraps by itself."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _call_stateless(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    """Call a processor, and refuse it if the call changed it: rejected positions would leave their mark."""
    before = _state(processor)
    scores = processor(ids, scores)
    if _state(processor) != before:
        raise UsageError(
            f"{type(processor).__name__} keeps state between calls, so candidates that are rejected would change the output; "
            "use a processor that depends on its arguments alone"
        )
    return scores


def _state(processor: LogitsProcessor) -> bytes:
    try:
        return pickle.dumps(vars(processor))
    except Exception as error:
        raise UsageError(f"{type(processor).__name__} cannot be checked for state between calls: {error}") from error
