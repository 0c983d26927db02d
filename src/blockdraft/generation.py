"""What a user calls: generate answers, or stream one."""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

from blockdraft.decoding.decode import decode
from blockdraft.decoding.probe import costs_of
from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Drafter
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import DEPTH, Eagle3Drafter
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.errors import UsageError
from blockdraft.prompts import Prompt, encode
from blockdraft.rules.budget import MOST, Budget
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target

TREE_UNDER_REJECTION = "a tree's candidates are chosen, not drawn: the rejection rule needs tree off (or acceptance match)"
MOST_CANDIDATES = 1024  # of a fixed tree, as in DDTree's experiments
# What has been learned about each drafter, by slots of a block: the next answer begins with it.
_budgets: WeakKeyDictionary[DFlashDrafter, dict[tuple[int, bool], Budget]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Completion:
    """An answer and how it came about; the fields are those of ``blockdraft generate --json``.

    Attributes:
        text: without special tokens, cut before a stop string.
        token_ids: every emitted token, the end token included.
        rounds: verification passes; 0 for "ar".
        acceptance_length: tokens emitted in rounds / rounds (the first token comes from the prompt's pass); None for "ar".
        acceptance_by_position: share of rounds in which a candidate at depth 1, 2, ... stood and was emitted; None for "ar".
        candidates_per_round: verified on the mean; None for "ar".
        plain_rounds: rounds without a candidate: drafting rested, because it did not pay.
        tokens_per_second: after the first token; time between passes (a slow reader of the stream) does not count.
        time_to_first_token_s: the pass over the prompt.
        finish_reason: "stop", "length" or "interrupted".
        method: what ran: "ar", "dflash" (a chain), "dflash-tree", "lookup", "eagle3" (a chain), "eagle3-tree" or "draft-model".
        drafter: its name, or None.
        kernels: what of the target ran in blockdraft's own: "layers", "operations" or "none" (``Target.kernels``).
        seed: of the noise; None for greedy decoding.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    acceptance_length: float | None
    acceptance_by_position: list[float] | None
    candidates_per_round: float | None
    plain_rounds: int
    tokens_per_second: float | None
    time_to_first_token_s: float
    finish_reason: str
    method: str
    target: str
    drafter: str | None
    dtype: str
    device: str
    kernels: str
    seed: int | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    drafter: Drafter | None = None,
    sampling: SamplingParams | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    batch_size: int = 4,
    block_size: int | None = None,
    tree: int | str = "auto",
    max_context: int | None = None,
) -> list[Completion]:
    """Answer one prompt or many.

    Args:
        target: from ``load_target``.
        prompts: a text, a list of chat messages or of token ids; or a list of such prompts.
        drafter: from ``load_drafter``; None decodes autoregressively.
        sampling: default: greedy, at most 256 new tokens.
        system: a system message for all of them.
        raw: no chat template.
        batch_size: rows decoded at the same time.
        block_size: other than the drafter's own.
        tree: see ``with_tree``.
        max_context: a lower limit on prompt and answer together than the target's.

    Raises:
        UsageError: see ``SamplingParams``, ``encode`` and ``Request``.
    """
    sampling = sampling or SamplingParams()
    several = isinstance(prompts, list | tuple) and bool(prompts) and not _is_one_prompt(prompts)
    encoded = [encode(target, prompt, system, raw) for prompt in (prompts if several else [prompts])]  # type: ignore[arg-type]
    requests = [Request(ids, sampling, target, row, max_context) for row, ids in enumerate(encoded)]
    block_size = checked_block_size(block_size, drafter)
    drafter = with_tree(target, drafter, tree, block_size, sampling.acceptance)
    for _ in decode(target, drafter, requests, batch_size, block_size):
        pass
    return [completion(request, target, drafter) for request in requests]


def stream(
    target: Target,
    prompt: Prompt,
    drafter: Drafter | None = None,
    sampling: SamplingParams | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    block_size: int | None = None,
    tree: int | str = "auto",
    max_context: int | None = None,
) -> Iterator[str]:
    """The text of one answer as it becomes certain; arguments as for ``generate``."""
    sampling = sampling or SamplingParams()
    request = Request(encode(target, prompt, system, raw), sampling, target, 0, max_context)
    block_size = checked_block_size(block_size, drafter)
    drafter = with_tree(target, drafter, tree, block_size, sampling.acceptance)
    for _ in decode(target, drafter, [request], 1, block_size):
        piece = request.take_text()
        if piece:
            yield piece


def completion(request: Request, target: Target, drafter: Drafter | None) -> Completion:
    """What a finished request amounts to."""
    new, rounds = len(request.output), request.rounds
    seconds = request.decode_seconds
    shares = [count / rounds for count in request.accepted_at] if rounds else []
    shares += [0.0] * (request.block_size - 1 - len(shares))
    return Completion(
        text=request.text,
        token_ids=list(request.output),
        prompt_tokens=len(request.prompt),
        new_tokens=new,
        rounds=rounds,
        acceptance_length=(new - 1) / rounds if rounds else None,
        acceptance_by_position=shares if rounds else None,
        candidates_per_round=request.candidates / rounds if rounds else None,
        plain_rounds=request.plain_rounds,
        tokens_per_second=(new - 1) / seconds if new > 1 and seconds > 0 else None,
        time_to_first_token_s=request.prefill_seconds,
        finish_reason=request.finish_reason or "interrupted",
        method="ar" if drafter is None else drafter.method,
        target=target.name,
        drafter=drafter.name if drafter is not None else None,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        kernels=target.kernels,
        seed=None if request.params.greedy else request.sampler.seed,
    )


def with_tree(
    target: Target,
    drafter: Drafter | None,
    tree: int | str = "auto",
    block_size: int | None = None,
    acceptance: str = "match",
    copy: bool = True,
) -> Drafter | None:
    """A drafter that proposes trees, if it can and shall; else as it is.

    Args:
        tree: for DFlash, "auto": as many slots and candidates in each round as pay, with copies of earlier text among them,
            measured once per machine and pair; a number: always the whole block and so many candidates; "off": a chain. A
            DFlash 2, or a DFlash of several denoising steps, is always a chain. For EAGLE-3 a number is its dynamic tree of so
            many candidates, anything else a chain.
        block_size: other than the drafter's own.
        acceptance: under "rejection" the candidates must be drawn, which a chain does: "auto" is a chain there.
        copy: whether earlier text is among the branches of a DFlash's tree.

    Raises:
        UsageError: no such tree, or one under the rejection rule.
    """
    if tree not in ("auto", "off") and (not isinstance(tree, int) or not 1 <= tree <= MOST_CANDIDATES):
        raise UsageError(f"tree is {tree!r}; it must be auto, off, or a number of candidates from 1 to {MOST_CANDIDATES}")
    if isinstance(drafter, Eagle3Drafter):
        if not isinstance(tree, int):
            return drafter.with_tree(None)
        if acceptance == "rejection":
            raise UsageError(TREE_UNDER_REJECTION)
        if block_size is not None and not 1 < block_size <= DEPTH + 1:
            raise UsageError(f"the block size is {block_size}; with a tree of EAGLE-3 it must be from 2 to {DEPTH + 1}")
        return drafter.with_tree(tree)
    if not isinstance(drafter, DFlashDrafter):
        if isinstance(tree, int):
            raise UsageError(f"tree {tree} needs a drafter whose tokens have probabilities, DFlash or EAGLE-3; leave it out")
        return drafter
    slots = block_size or drafter.block_size
    if drafter.config.selector is not None or drafter.denoising_steps > 1:
        if isinstance(tree, int):
            what = "a DFlash 2" if drafter.config.selector is not None else "a block of several denoising steps"
            raise UsageError(f"{what} chooses each word knowing others: it has no tree; leave it out, or take tree=off")
        if drafter.denoising_steps > 1 and acceptance == "rejection":
            raise UsageError(
                "with several denoising steps a draft's law knows later slots, which the rejection rule does not allow"
            )
        return drafter
    if tree == "off":
        return drafter
    if acceptance == "rejection":
        if tree != "auto":
            raise UsageError(TREE_UNDER_REJECTION)
        return drafter
    if slots == 1 and tree != "auto":
        raise UsageError("a block of one slot, the anchor, has nothing to grow a tree from; leave the block size or the tree out")
    if slots == 1 or (tree == "auto" and target.context <= MOST + 1):  # nothing to draft, or no room for a tree: the chain
        return drafter
    if isinstance(tree, int):
        return TreeDrafter(drafter, Budget(None, slots, tree), copy)
    if (slots, copy) not in _budgets.setdefault(drafter, {}):
        _budgets[drafter][slots, copy] = Budget(costs_of(target, drafter), slots, clock=time.perf_counter)
    return TreeDrafter(drafter, _budgets[drafter][slots, copy], copy)


def checked_block_size(block_size: int | None, drafter: Drafter | None) -> int | None:
    """A block size that can run: at least 1; wider than trained runs, with a warning.

    Raises:
        UsageError: below 1, or given without a drafter.
    """
    if block_size is None:
        return None
    if drafter is None:
        raise UsageError("a block size needs a drafter; autoregressive decoding emits one token per step")
    if block_size < 1:
        raise UsageError(f"the block size is {block_size}; it must be at least 1")
    if isinstance(drafter, DFlashDrafter | Eagle3Drafter) and block_size > drafter.block_size:
        warnings.warn(f"block size {block_size} is above the {drafter.block_size} that {drafter.name} was trained for")
    return block_size


def _is_one_prompt(prompts: Sequence[object]) -> bool:
    return isinstance(prompts[0], int | dict)
