"""Draft trees: the best prefixes, copies among them, a budget by cost, and output that no shape can change."""

import itertools
import json
import math
import random
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockdraft.decoding import probe
from blockdraft.decoding.decode import Decoder, decode
from blockdraft.decoding.probe import costs_of
from blockdraft.decoding.request import Request
from blockdraft.drafters.lookup import History, LookupDrafter
from blockdraft.drafters.tree import TreeDrafter, grow, grow_by_levels
from blockdraft.engine import kernels
from blockdraft.engine.cache import KVCache
from blockdraft.engine.kernels import library, see_ancestors, why_none
from blockdraft.errors import UsageError
from blockdraft.generation import with_tree
from blockdraft.rules.budget import MOST, SAVED, SHARE, Budget, Costs, Pending
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import COUNT, Scripted, random_drafter, run

FREE = Costs(verify=((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (16, 1.0), (33, 1.0), (65, 1.0)), draft=((2, 0.01), (8, 0.01)))
DEAR = Costs(verify=((1, 1.0), (2, 1.9), (4, 3.7), (8, 7.5), (16, 15.0)), draft=((2, 0.5), (8, 0.5)))


class Sure(Scripted):
    """Marginals that give the guess a set probability, and the rest of it to the next id."""

    def __init__(self, guess, probability=0.9, block_size=8, vocabulary=tiny.VOCABULARY):
        super().__init__(guess, block_size)
        self.probability, self.vocabulary = probability, vocabulary

    def likely(self, anchors, widths, most):
        chain = self.propose(anchors, widths, None)
        tokens = chain.tokens[..., None]
        words = torch.cat([tokens, (tokens + 1) % self.vocabulary], dim=-1)
        logs = torch.tensor([self.probability, 1 - self.probability]).log().expand(*words.shape).clone()
        inside = torch.arange(1, max(widths)) < torch.tensor(list(widths))[:, None]
        return logs.masked_fill(~inside[..., None], float("-inf")), words


def knowing(answers, right=True):
    def guess(ids, count):
        for prompt, answer in answers.items():
            if tuple(ids[: len(prompt)]) == prompt:
                at = len(ids) - len(prompt)
                return [(t + 2 * (not right)) % tiny.VOCABULARY for t in answer[at : at + count]]
        return []

    return guess


# ---- the tree


def brute(logs, words, copy, copy_logs, nodes):
    """Scores of the best prefixes by enumerating all of them."""
    slots, k = logs.shape
    scores = {}
    for depth in range(1, slots + 1):
        for ranks in itertools.product(range(k), repeat=depth):
            prefix = tuple(int(words[i, r]) for i, r in enumerate(ranks))
            scores[prefix] = sum(float(logs[i, r]) for i, r in enumerate(ranks))
    for depth in range(1, len(copy) + 1):
        if copy_logs[depth - 1] == float("-inf"):
            break
        prefix = tuple(copy[:depth])
        raised = max(scores.get(prefix, float("-inf")), copy_logs[depth - 1])
        behind = scores.get(prefix, float("-inf"))
        for longer in [p for p in scores if p[:depth] == prefix]:  # what the drafter adds behind a copy starts from its probability
            if behind > float("-inf"):
                scores[longer] += raised - behind
        scores[prefix] = raised
        for extra in range(1, slots - depth + 1):
            for ranks in itertools.product(range(k), repeat=extra):
                tail = tuple(int(words[depth + i, r]) for i, r in enumerate(ranks))
                if prefix + tail not in scores:
                    scores[prefix + tail] = raised + sum(float(logs[depth + i, r]) for i, r in enumerate(ranks))
    return sorted(scores.values(), reverse=True)[:nodes], scores


@pytest.mark.parametrize("grow", [grow, grow_by_levels], ids=["here", "torch"])
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 12), st.floats(0.1, 0.99))
@settings(max_examples=150, deadline=None)
def test_grow_finds_the_best_prefixes(grow, seed, slots, k, copied, nodes, sure):
    generator = torch.Generator().manual_seed(seed)
    k = max(k, 1)
    logits = torch.randn(1, slots, 8, generator=generator)
    logs, words = logits.log_softmax(-1).topk(k, dim=-1)
    copy = torch.randint(0, 8, (1, copied), generator=generator)
    copy_logs = torch.tensor([[math.log(sure) * (i + 1) for i in range(copied)]]).view(1, copied)
    tokens, parents, scores = grow(logs, words, copy, copy_logs, nodes)
    expected, known = brute(logs[0], words[0], copy[0].tolist(), copy_logs[0].tolist(), nodes)
    real = [s for s in scores[0].tolist() if s > float("-inf")]
    if k >= nodes or k == 8:  # else a dropped sibling may be missed
        assert real == pytest.approx(expected, abs=1e-4)
    paths = {0: ()}
    for i, (token, parent, score) in enumerate(zip(tokens[0].tolist(), parents[0].tolist(), scores[0].tolist(), strict=True), 1):
        if score == float("-inf"):
            continue
        assert parent < i, "a parent stands before its child"
        paths[i] = (*paths[parent], token)
        assert known[paths[i]] == pytest.approx(score, abs=1e-4)
    assert len(set(paths.values())) == len(paths), "no prefix twice"
    assert scores[0].tolist() == sorted(scores[0].tolist(), reverse=True)


@given(st.integers(0, 10**6), st.integers(0, 7), st.integers(0, 32), st.integers(1, 64), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_kernel_grows_the_tree_that_torch_grows(seed, slots, copied, nodes, rows):
    """At the sizes of real rounds: the same nodes with the same scores to the bit, whatever their order among equals."""
    assume(slots or copied)
    if library() is None:
        pytest.skip(why_none())
    generator = torch.Generator().manual_seed(seed)
    logs, words = (torch.randn(rows, slots, 200, generator=generator) * 3).log_softmax(-1).topk(64, dim=-1)
    copies = torch.randint(0, 200, (rows, copied), generator=generator)
    near = slots and copied and seed % 2
    if near:  # the drafter thinks of the copy too
        copies[:, : min(slots, copied)] = words[:, :copied, seed % 3][:, :slots]
    copy_logs = -torch.rand(rows, copied, generator=generator).cumsum(1)
    copy_logs[:, 20:] = float("-inf")
    ours, theirs = (make(logs, words, copies, copy_logs, nodes) for make in (grow, grow_by_levels))
    for row in range(rows):
        real = [sorted(_paths(*(x[row].tolist() for x in found))) for found in (ours, theirs)]
        assert real[0] == real[1]


def _paths(tokens, parents, scores):
    paths = {0: ()}
    for i, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True), 1):
        if score > float("-inf"):
            paths[i] = (*paths[parent], token)
            yield paths[i], score


@given(st.integers(1, 64), st.integers(1, 3), st.integers(0, 10**6))
def test_kernel_and_torch_see_the_same_ancestors(candidates, rows, seed):
    if library() is None:
        pytest.skip(why_none())
    chance = random.Random(seed)
    parents = torch.tensor([[chance.randint(0, i) for i in range(candidates)] for _ in range(rows)])
    for ours, theirs in zip(see_ancestors(parents), Proposal._squared(parents), strict=True):
        assert torch.equal(ours, theirs)


def test_a_path_is_kept_alike_by_kernel_and_torch(monkeypatch):
    """Over layers of unlike heads and sizes, in one row of several, in place."""
    if library() is None:
        pytest.skip(why_none())
    kept = []
    for built in (library, lambda: None):
        monkeypatch.setattr(kernels, "library", built)
        cache, generator = KVCache(3, 40, torch.float32, torch.device("cpu")), torch.Generator().manual_seed(0)
        for layer, (heads, size) in enumerate(((2, 16), (3, 8))):
            for buffer in cache.buffers(layer, heads, size):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        cache.lengths[1] = 7
        cache.open(1, torch.zeros(1, 20, dtype=torch.long))
        cache.commit([[0, 2, 3, 9, 19]])
        assert cache.lengths == [0, 12, 0]
        kept.append([*cache.keys.values(), *cache.values.values()])
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours, theirs)


def test_grow_rows_do_not_mix():
    generator = torch.Generator().manual_seed(0)
    logs, words = torch.randn(5, 4, 30, generator=generator).log_softmax(-1).topk(8, dim=-1)
    copy = torch.randint(0, 30, (5, 6), generator=generator)
    copy_logs = -torch.arange(1.0, 7.0).expand(5, -1) * torch.rand(5, 1, generator=generator)
    copy_logs[2] = float("-inf")
    together = grow(logs, words, copy, copy_logs, 20)
    for row in range(5):
        alone = grow(*(x[row : row + 1] for x in (logs, words, copy, copy_logs)), 20)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[row], b[0])


@given(st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_lineage_of_random_trees(count, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[int(torch.randint(0, i + 1, (), generator=generator)) for i in range(count)]])
    proposal = Proposal(torch.zeros(1, count, dtype=torch.long), [count + 1], parents)
    seen, depths = torch.zeros(count + 1, count + 1, dtype=torch.bool), []
    for node in range(count + 1):
        at, steps = node, 0
        while True:
            seen[node, at] = True
            if at == 0:
                break
            at, steps = int(parents[0, at - 1]), steps + 1
        depths.append(steps)
    assert torch.equal(proposal.visible()[0], seen)
    assert proposal.depths()[0].tolist() == depths[1:]


# ---- copies


def test_history_finds_the_longest_and_latest():
    history = History()
    history.extend([1, 2, 3, 9, 2, 3, 7, 5, 2])
    assert history.continuation(3, 3) == ([7, 5, 2], 2)  # "2 3": the latest
    history.extend([3, 1, 2])
    assert history.continuation(3, 2) == ([9, 2], 3)  # "1 2 3" is longer
    assert history.continuation(8, 3) == ([], 0)


def test_history_goes_on_with_a_period():
    history = History()
    history.extend([4, 5, 4])
    assert history.continuation(5, 7)[0] == [4, 5, 4, 5, 4, 5, 4]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_history_forgets_what_is_truncated(tokens, kept):
    cut, plain = History(), History()
    cut.extend(tokens)
    cut.truncate(min(kept, len(tokens)))
    plain.extend(tokens[:kept])
    for anchor in range(4):
        assert cut.continuation(anchor, 5) == plain.continuation(anchor, 5)


# ---- lossless


@pytest.fixture(scope="module")
def prompts():
    return [tiny.prompt(length, seed) for seed, length in enumerate((6, 1, 11, 8))]


@pytest.fixture(scope="module")
def answers(reference, prompts):
    return {tuple(prompt): tiny.greedy(reference, prompt, COUNT + 40) for prompt in prompts}


def make(kind, llama, answers):
    return {
        "random": lambda: random_drafter(llama),
        "right": lambda: Sure(knowing(answers)),
        "wrong": lambda: Sure(knowing(answers, right=False)),
    }[kind]()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("budget", ["1", "5", "64", "free", "dear"])
@pytest.mark.parametrize("kind", ["random", "right", "wrong"])
def test_greedy_output_is_the_targets_own(kind, budget, batch_size, llama, prompts, answers):
    costs = {"free": FREE, "dear": DEAR}.get(budget)
    drafter = TreeDrafter(make(kind, llama, answers), Budget(costs, 8, None if costs else int(budget)))
    for request in run(llama, drafter, prompts, batch_size):
        assert request.output == answers[tuple(request.prompt)][:COUNT]
        if kind == "right" and budget in ("64", "free"):
            assert request.rounds < COUNT / 4


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gemma2", "gpt2", "gpt_oss"])
def test_families(family):
    target, plain = tiny.target(family), tiny.model(family)
    some = [tiny.prompt(length, length) for length in (12, 3)]
    for drafter in (TreeDrafter(random_drafter(target), Budget(None, 8, 40)), LookupDrafter()):
        for request in run(target, drafter, some, 2):
            assert request.output == tiny.greedy(plain, request.prompt, COUNT)


@pytest.mark.parametrize("budget", [7, 64])
def test_seeded_sampling_is_that_of_plain_decoding(budget, llama, prompts, answers):
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
    plain = run(llama, None, prompts, **how)
    for drafter in (TreeDrafter(random_drafter(llama), Budget(None, 8, budget)), LookupDrafter()):
        for drafted, alone in zip(run(llama, drafter, prompts, 2, **how), plain, strict=True):
            assert drafted.output == alone.output


def test_rejection_has_no_tree(llama):
    drafter = TreeDrafter(random_drafter(llama), Budget(None, 8, 8))
    with pytest.raises(UsageError, match="chosen, not drawn"):
        run(llama, drafter, [tiny.prompt(5, 0)], temperature=1.0, acceptance="rejection")


def test_repeated_text_is_copied_without_a_draft():
    """This greedy model falls into a loop."""
    target = tiny.target("gemma", seed=1)
    prompt, drafter = tiny.prompt(6, 0), random_drafter(target)
    alone = run(target, None, [prompt], max_new_tokens=160)[0]
    request = run(target, TreeDrafter(drafter, Budget(FREE, 8)), [prompt], max_new_tokens=160)[0]
    assert request.output == alone.output
    assert 159 / request.rounds > 3
    assert drafter.forwards < request.rounds


# ---- the budget


@given(st.lists(st.floats(-6, -0.01), min_size=1, max_size=40), st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_nodes_are_the_optimum_of_the_cost_curve(logs, seed, rows):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.rand(9, generator=generator).cumsum(0).tolist()
    costs = Costs(tuple(zip((1, 2, 3, 5, 8, 12, 16, 32, 64), steps, strict=True)), ((2, 0.2), (8, 0.3)))
    budget = Budget(costs, 8)
    scores = sorted(logs, reverse=True)
    [chosen, *others] = budget.nodes([scores] * rows, 8)
    assert all(other == chosen for other in others)
    gains = [budget._nodes.of(min(int(-s / 0.5), 23)) for s in scores]

    def rate(n):
        return (rows + rows * sum(gains[:n])) / (costs.of_draft(8 * rows) + costs.of_verify(rows * (n + 1)))

    best = max(rate(tokens - 1) for tokens, _ in costs.verify)
    assert rate(chosen) >= best * (1 - 1e-6)


def test_probabilities_are_corrected_by_outcomes():
    budget = Budget(FREE, 8)
    before = budget._nodes.of(1)
    for _ in range(200):
        budget.reset(1)
        budget.proposed([Pending([5], [0], [-0.6], 8, [], 0)])
        budget.learn(0, [[4]])
    assert budget._nodes.of(1) < before / 5
    for _ in range(2000):
        budget.reset(1)
        budget.proposed([Pending([5], [0], [-0.6], 8, [], 0)])
        budget.learn(0, [[4, 5]])
    assert budget._nodes.of(1) > 0.8


def test_costs_are_corrected_by_the_time_that_rounds_take():
    """Verifying is dearer than measured: what looked best stops being chosen. One round that was held up changes little."""
    costs = Costs(verify=((1, 1.0), (8, 1.2)), draft=((2, 0.1), (8, 0.1)))
    now = [0.0]
    budget = Budget(costs, 8, clock=lambda: now[0])

    def play(drafted, plain, rounds):
        chosen = []
        for _ in range(rounds):
            budget.begin()
            slots = budget.slots([0], 0)
            chosen.append(slots)
            tree = ([5, 6], [0, 1], [-0.5, -1.0]) if slots > 1 else ([], [], [])
            budget.proposed([Pending(*tree, slots, [], 0)])
            now[0] += drafted if slots > 1 else plain
            budget.learn(0, [[4, 5] if slots > 1 else [4]])
        return chosen

    budget.reset(1)
    assert set(play(1.3, 1.0, 100)) <= {4, 8}, "two tokens for 1.3 steps"
    play(60.0, 1.0, 1)
    assert play(1.3, 1.0, 60).count(1) < 20
    assert play(2.6, 1.0, 200)[100:].count(1) > 90


def test_costs_follow_the_context():
    """A verification that is nearly free in a short context is not in a long one: there nothing is drafted."""
    near = Costs(verify=((1, 1.0), (8, 1.2)), draft=((2, 0.1), (8, 0.1)), context=256)
    far = Costs(verify=((1, 2.0), (8, 9.2)), draft=((2, 0.1), (8, 0.05)), context=2048)
    costs = replace(near, longer=far)
    assert costs.at(100).verify == near.verify == near.at(5000).verify
    assert costs.at(1152).verify == ((1, 1.5), (8, pytest.approx(5.2)))
    assert costs.at(3840).draft == ((2, 0.1), (8, 0.1)), "more context never costs less"
    budget = Budget(costs, 8)
    for context, drafts in ((100, True), (2048, False), (300, True)):
        budget.begin(context)
        assert (budget.slots([0], 0) > 1) == drafts


@given(st.integers(1, 32), st.floats(0.05, 12.0), st.integers(100, 400))
@settings(max_examples=60, deadline=None)
def test_trials_take_a_small_share_of_plain_rounds(rows, dear, rounds):
    """Whatever a draft costs, and however often the batch is another: where it brings nothing, it soon takes hardly any time."""
    costs = Costs(verify=((1, 1.0), (64, 1.0 + dear / 2), (256, 1.0 + 2 * dear)), draft=((2, dear / 2), (8, dear / 2)))
    budget, lost = Budget(costs, 8), 0.0
    for number in range(rounds):
        if number % 60 == 0:
            budget.reset(rows)
        budget.begin()
        slots = budget.slots([0] * rows, 0)
        if number >= 60 and slots > 1:
            lost += (costs.of_draft(slots, rows) + costs.of_verify(8 * rows)) / costs.of_verify(rows) - 1
        tree = ([5] * 7, list(range(7)), [-0.1 * i for i in range(1, 8)]) if slots > 1 else ([], [], [])
        budget.proposed([Pending(*tree, slots, [], 0)] * rows)
        budget.learn(0, [[4]] * rows)
    assert lost <= SAVED + SHARE * rounds


def test_rows_without_a_draft_are_not_charged_one():
    """A batch's plain rounds take what their verification costs: no correction is learned."""
    costs = Costs(verify=((1, 1.0), (64, 2.0)), draft=((2, 0.5), (8, 0.5)))
    now = [0.0]
    budget = Budget(costs, 8, clock=lambda: now[0])
    budget.reset(4)
    for _ in range(50):
        budget.begin()
        budget.proposed([Pending([], [], [], 1, [], 0)] * 4)
        now[0] += costs.of_verify(4)
        budget.learn(0, [[4]] * 4)
    assert budget._paces[0].of(1.0) == pytest.approx(1.0)


def test_copies_win_without_drafts_where_they_are_long():
    """A long copy that stands needs no draft: it is verified alone."""
    costs = Costs(verify=((1, 1.0), (8, 1.3), (16, 1.6)), draft=((2, 0.4), (8, 0.4)))
    assert Budget(costs, 8).slots([8], 16) == 1
    assert Budget(costs, 8).slots([0], 0) > 1


def test_drafting_rests_where_it_never_pays_and_comes_back(llama, reference, prompts):
    prompt = prompts[0]
    right = {tuple(prompt): tiny.greedy(reference, prompt, 200)}
    costs = Costs(verify=((1, 1.0), (4, 1.3), (8, 1.5), (16, 2.5)), draft=((2, 0.3), (8, 0.3)))
    good, bad = knowing(right), knowing(right, right=False)
    switch = Sure(lambda ids, count: (bad if len(ids) < 110 else good)(ids, count))
    request = run(llama, TreeDrafter(switch, Budget(costs, 8), copy=False), [prompt], max_new_tokens=180)[0]
    assert request.output == right[tuple(prompt)][:180]
    early = switch.forwards
    assert request.rounds < 180 - 25, "drafting came back when it paid"
    alone = run(llama, TreeDrafter(Sure(bad), Budget(costs, 8), copy=False), [prompt], max_new_tokens=180)[0]
    assert alone.rounds == 179
    wrong = Sure(bad)
    run(llama, TreeDrafter(wrong, Budget(costs, 8), copy=False), [prompt], max_new_tokens=180)
    assert wrong.forwards < 60 and early > wrong.forwards


def test_a_row_that_was_given_up_in_the_middle_of_a_round_is_forgotten(llama, reference, prompts):
    """Ctrl-C while the target verifies: the next prompt's tokens are no outcome of that round's candidates."""
    drafter = TreeDrafter(random_drafter(llama), Budget(FREE, 8))
    decoder = Decoder(llama, drafter, 1, 80)
    params = SamplingParams(max_new_tokens=COUNT, stop_token_ids=())
    decoder.admit(Request(prompts[0], params, llama))
    drafter.propose(torch.tensor([decoder.active[0].output[-1]]), [8], None)
    decoder.abandon()
    again = Request(prompts[2], params, llama)
    decoder.admit(again, reuse=True)
    while decoder.active:
        decoder.round()
    assert again.output == tiny.greedy(reference, prompts[2], COUNT)


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        ("none", {"tree": 8}, "needs a drafter whose tokens have probabilities"),
        ("lookup", {"tree": 8}, "needs a drafter whose tokens have probabilities"),
        ("random", {"tree": 8, "block_size": 1}, "has nothing to grow a tree from"),
        ("random", {"tree": 0}, "tree is 0; it must be auto, off, or a number of candidates from 1 to 1024"),
        ("random", {"tree": "wide"}, "tree is 'wide'"),
        ("random", {"tree": 8, "acceptance": "rejection"}, "chosen, not drawn"),
    ],
)
def test_trees_that_cannot_be(drafter, options, said, llama):
    made = {"none": None, "lookup": LookupDrafter(), "random": random_drafter(llama)}[drafter]
    with pytest.raises(UsageError, match=said):
        with_tree(llama, made, **options)


def test_auto_is_a_chain_where_no_tree_can_be(llama):
    short = tiny.target("llama", max_position_embeddings=60)
    drafter = random_drafter(short)
    assert with_tree(short, drafter) is drafter
    assert with_tree(llama, drafter, "auto", 1) is drafter
    assert with_tree(llama, drafter, "auto", None, "rejection") is drafter
    assert with_tree(llama, drafter, "off") is drafter


def test_what_was_learned_about_a_drafter_stays(llama):
    drafter = random_drafter(llama)
    assert with_tree(llama, drafter).budget is with_tree(llama, drafter).budget
    assert with_tree(llama, drafter).budget is not with_tree(llama, drafter, "auto", 4).budget
    assert with_tree(llama, drafter).budget is not with_tree(llama, random_drafter(llama)).budget


@pytest.mark.parametrize("tree", ["off", 9])
def test_a_drafter_works_for_one_decoding_at_a_time(llama, prompts, tree):
    """Another one takes over its caches; going on with the first would draft from the wrong text."""
    drafter = random_drafter(llama)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    first, second = (decode(llama, with_tree(llama, drafter, tree), [Request(prompt, params, llama)]) for prompt in prompts[:2])
    next(first)
    next(second)
    with pytest.raises(UsageError, match="work for another decoding"):
        list(first)
    list(second)


def test_costs_are_measured_in_two_contexts_and_kept(llama, monkeypatch):
    monkeypatch.setattr(probe, "CONTEXTS", (8, 40))
    drafter = random_drafter(llama)
    costs = probe.measure(llama, drafter)
    assert costs.longer is not None
    assert (costs.context, costs.longer.context) == (8, 40)
    assert [tokens for tokens, _ in costs.longer.verify] == list(probe.SIZES)
    assert probe._restored(json.loads(json.dumps(asdict(costs)))) == costs
    monkeypatch.setattr(probe, "CONTEXTS", (8, 12))
    assert probe.measure(llama, drafter).longer is None


def test_costs_of_a_busy_machine_are_not_believed_later(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    drafter = random_drafter(llama)
    measured, steps = [], [0.01, 0.04]
    costs = Costs(((1, 0.01), (8, 0.02)), ((2, 0.001), (4, 0.001)))
    monkeypatch.setattr(probe, "measure", lambda *pair: measured.append(1) or costs)
    monkeypatch.setattr(probe, "_step", lambda target: steps.pop() if steps else 0.01)
    costs_of(llama, drafter)
    assert not (tmp_path / "costs").exists(), "a plain step took four times as long before as after: they are not kept"
    measured.clear()
    first = costs_of(llama, drafter)
    assert costs_of(llama, drafter) == first
    assert len(measured) == 1, "the second time they come from the store"
    [place] = (tmp_path / "costs").iterdir()
    kept = json.loads(place.read_text())
    slow = [[tokens, 100 * seconds] for tokens, seconds in kept["verify"]]
    for count, changes in enumerate(({"verify": slow, "step": 1.0}, {"verify": slow}), 2):  # busy all along, or until the end
        place.write_text(json.dumps(kept | changes))
        assert costs_of(llama, drafter) == first
        assert len(measured) == count


def test_a_large_tree_fits(llama, prompts):
    drafter = TreeDrafter(random_drafter(llama), Budget(None, 8, MOST))
    request = run(llama, drafter, [prompts[0]])[0]
    assert request.output
