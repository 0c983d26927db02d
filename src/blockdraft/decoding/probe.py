"""Probe: what a verification and a draft cost on this machine, measured once per pair and dtype and kept in the store."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.engine.cache import KVCache
from blockdraft.engine.kernels import kernel_digest, processor
from blockdraft.files import store_folder, write_whole
from blockdraft.progress import Progress
from blockdraft.rules.budget import MOST, Budget, Costs
from blockdraft.rules.proposal import Proposal
from blockdraft.targets.target import Target

CONTEXTS = (256, 2048)  # tokens in the cache while measuring
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST + 1)  # tokens of a verification, the anchor included
REPEATS = 4
CHANGED = 1.5  # times as long or short as it was
OBSERVED = 2  # tokens that a drafter takes in before a draft
FORMAT = 6  # changes when what is measured does


def costs_of(target: Target, drafter: DFlashDrafter) -> Costs:
    """The pair's costs: from the store, or measured now, which takes seconds, said on stderr.

    What was measured on a busy machine is not kept, and what the store says is believed only if a plain step takes as long now.
    """
    place = store_folder() / "costs" / f"{_key(target, drafter)}.json"
    try:
        found = json.loads(place.read_text())
        kept = _restored(found)
        if _alike(_step(target), float(found["step"]), kept.of_verify(1)):
            return kept
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        pass
    began, before = time.perf_counter(), _step(target)
    with Progress("Measuring what tokens cost here, once", 1):
        costs = measure(target, drafter)
    after = _step(target)
    if not _alike(before, after, costs.of_verify(1)):
        print(
            "blockdraft: this machine is busy: what tokens cost is measured again at the next start",
            file=sys.stderr,
        )
        return costs
    if time.perf_counter() - began > 1:
        print("blockdraft: measured what tokens cost on this machine, once; kept for the next start", file=sys.stderr)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, lambda path: path.write_text(json.dumps({**asdict(costs), "step": after})))
    except OSError:
        pass  # a store that cannot be written costs a measurement per start, and nothing else
    return costs


def _alike(step: float, again: float, in_context: float) -> bool:
    """Whether a plain step took as long both times, and about as long as one measured on the way, in a context of ``CONTEXTS``."""
    return 1 / CHANGED < step / again < CHANGED and 1 / CHANGED < in_context / again < 2 * CHANGED


def _step(target: Target) -> float:
    """Seconds of a plain step in an empty cache."""
    cache, token = target.new_cache(1, REPEATS + 1), torch.zeros(1, dtype=torch.long, device=target.device)
    return _seconds(lambda: target.step(cache, token).max(dim=-1).indices.tolist())


def _restored(found: dict[str, Any]) -> Costs:
    verify, draft = (tuple((int(tokens), float(seconds)) for tokens, seconds in found[name]) for name in ("verify", "draft"))
    return Costs(verify, draft, int(found["context"]), _restored(found["longer"]) if found["longer"] is not None else None)


def measure(target: Target, drafter: DFlashDrafter) -> Costs:
    """Measure a pair, one row of ``CONTEXTS`` tokens, or fewer where the target's context is short."""
    most = target.context - MOST - 1
    near, far = min(CONTEXTS[0], most), min(CONTEXTS[1], most)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (near,), generator=generator).tolist()
    cache = target.new_cache(1, far + MOST + 1)
    tree = TreeDrafter(drafter, Budget(None, drafter.block_size, MOST))
    tree.reset(1, far + OBSERVED + max(MOST + 1, drafter.block_size))
    observed = None
    for _, features in target.prefill(cache, 0, ids, drafter.taps):
        assert features is not None
        start, observed = cache.lengths[0] - features.shape[1], features[:, :OBSERVED]
        tree.observe(0, torch.tensor([ids[start : cache.lengths[0]]], device=target.device), features, [features.shape[1]])
    assert observed is not None
    short = _measured(target, tree, cache, observed)
    if far < 2 * near:
        return short
    # What the caches hold does not matter: the target's zeros take as long as what a text would have left.
    behind = torch.randint(0, target.vocab_size, (1, far - near), generator=generator).to(target.device)
    tree.truncate(0, near)  # forget the last draft
    tree.observe(0, behind, observed[:, :1].expand(-1, far - near, -1), [far - near])
    cache.lengths[0] = far
    longer = _measured(target, tree, cache, observed)
    target.give_back(cache)
    return replace(short, longer=longer)


def _measured(target: Target, tree: TreeDrafter, cache: KVCache, observed: torch.Tensor) -> Costs:
    """In the context that both caches hold."""
    anchors, taps = torch.zeros(1, dtype=torch.long, device=target.device), tree.taps
    verified = partial(_verified, target, cache, anchors, taps)
    verify = [(size, _seconds(partial(verified, size))) for size in SIZES]
    slots = sorted({2, (tree.block_size + 1) // 2, tree.block_size} - {0, 1})
    # A draft finds the caches of the processor full of the target's weights.
    draft = [(count, _seconds(partial(_drafted, tree, anchors, observed, count), partial(verified, 1))) for count in slots]
    return Costs(_rising(verify), _rising(draft), cache.lengths[0])


def _verified(target: Target, cache: KVCache, anchors: torch.Tensor, taps: Sequence[int], size: int) -> None:
    device = target.device
    parents = torch.arange(size - 1, device=device)[None]
    proposal = Proposal(torch.arange(size - 1, device=device)[None] % target.vocab_size, [size], parents if size > 1 else None)
    logits, _ = target.verify(cache, anchors, proposal, taps)
    logits.max(dim=-1).indices.tolist()


def _drafted(tree: TreeDrafter, anchors: torch.Tensor, observed: torch.Tensor, slots: int) -> None:
    """Everything that a round with a draft does, and one without does not."""
    drafter, length = tree.drafter, len(tree.histories[0].tokens)
    drafter.observe(0, anchors[None].expand(-1, observed.shape[1]), observed, [observed.shape[1]])
    tree.propose(anchors, [slots], None)
    drafter.truncate(0, length)


def _seconds(work: Callable[[], object], before: Callable[[], None] | None = None) -> float:
    """The fastest of a few: what else runs on the machine only ever adds time."""
    work()
    times = []
    for _ in range(REPEATS):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _rising(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More tokens never cost less: what says so is noise."""
    highest, rising = 0.0, []
    for tokens, seconds in points:
        highest = max(highest, seconds)
        rising.append((tokens, highest))
    return tuple(rising)


def _key(target: Target, drafter: DFlashDrafter) -> str:
    c = drafter.config.backbone
    drafted = (c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, drafter.block_size, drafter.taps)
    where = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else f"{processor()}{torch.get_num_threads()}"
    config = target.model.config.to_json_string()
    paths = (target.packed_bytes > 0, target.kernels, drafter.packed_bytes > 0, kernel_digest())
    words = len(drafter.shortlist.ids) if drafter.shortlist is not None else 0
    facts = [FORMAT, torch.__version__, where, str(target.device), str(target.dtype), config, drafted, paths, words]
    described = json.dumps(facts)
    return hashlib.sha256(described.encode()).hexdigest()[:24]
