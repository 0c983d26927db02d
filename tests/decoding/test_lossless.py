"""Greedy fp32 output is the target's own, whatever the drafter, the block, the batch and the family."""

import pytest
import torch

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import Bushy, Scripted, knowing, random_drafter

COUNT = 24
PROMPTS = [tiny.prompt(length, seed) for seed, length in enumerate((6, 1, 11, 8))]  # the first one is known to ``trained``


def run(target, drafter, prompts, block_size=None, batch_size=1, **params):
    requests = [
        Request(prompt, SamplingParams(**{"max_new_tokens": COUNT, "stop_token_ids": (), **params}), target, row)
        for row, prompt in enumerate(prompts)
    ]
    list(decode(target, drafter, requests, batch_size, block_size))
    return requests


@pytest.fixture(scope="module")
def answers(reference):
    return {tuple(prompt): tiny.greedy(reference, prompt, COUNT + 40) for prompt in PROMPTS}


def make(kind, llama, trained, answers):
    return {
        "random": lambda: random_drafter(llama),
        "trained": lambda: trained,
        "always-right": lambda: knowing(answers),
        "always-wrong": lambda: knowing(answers, wrong_by=1),
        "mask-emitting": lambda: Scripted(lambda ids, count: [3] * count),
        "stop-emitting": lambda: Scripted(lambda ids, count: [2] * count),
        "tree": lambda: Bushy(knowing(answers).guess),
    }[kind]()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("kind", ["random", "trained", "always-wrong", "always-right", "mask-emitting", "stop-emitting", "tree"])
def test_cross_product(kind, block_size, batch_size, llama, trained, answers):
    drafter = make(kind, llama, trained, answers)
    prompts = PROMPTS if batch_size > 1 else PROMPTS[:2]
    requests = run(llama, drafter, prompts, block_size, batch_size)
    for request in requests:
        assert request.output == answers[tuple(request.prompt)][:COUNT]
        assert request.finish_reason == "length"
    if kind in ("always-right", "tree") and block_size > 1:  # the method ran, and drafts were really accepted
        assert all(request.rounds == -(-(COUNT - 1) // block_size) for request in requests)
    if kind == "always-wrong":
        assert all(request.rounds == COUNT - 1 and sum(request.accepted_at) == 0 for request in requests)


def test_trained_drafter_is_sometimes_right(llama, trained):
    """Training forward, decoding forward and labels agree: what was learned is accepted, some of it and not all."""
    request = run(llama, trained, [tiny.prompt(6, 0)], max_new_tokens=48)[0]
    assert 2.0 < 47 / request.rounds < 8.0


@pytest.mark.parametrize("length", [*range(1, 25), 40])
def test_every_prompt_length(length, llama, reference, trained):
    prompt = tiny.prompt(length, seed=length)
    assert run(llama, trained, [prompt])[0].output == tiny.greedy(reference, prompt, COUNT)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_families(family):
    target, plain = tiny.target(family), tiny.model(family)
    prompts = [tiny.prompt(length, length) for length in (12, 3)]  # longer than the window, and shorter
    expected = {tuple(prompt): tiny.greedy(plain, prompt, COUNT) for prompt in prompts}
    for drafter in (random_drafter(target), knowing(expected), Bushy(knowing(expected).guess), None):
        for request in run(target, drafter, prompts, batch_size=2):
            assert request.output == expected[tuple(request.prompt)]
    right = run(target, knowing(expected), prompts)
    assert all(request.rounds == -(-(COUNT - 1) // 8) for request in right)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_rows_of_a_ragged_batch_equal_single_runs(family):
    """T19: rows of different lengths, accepting differently, finishing at different times, in fewer slots than rows."""
    target = tiny.target(family)
    prompts = [tiny.prompt(length, length) for length in (3, 14, 1, 9, 21, 6)]
    limits = [17, 3, 24, 1, 9, 12]

    def requests():
        return [
            Request(prompt, SamplingParams(max_new_tokens=limit, stop_token_ids=()), target, row)
            for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]

    drafter = random_drafter(target, seed=3)
    single = requests()
    for request in single:
        list(decode(target, drafter, [request]))
    for batch_size in (2, 3, 6):
        batched = requests()
        list(decode(target, drafter, batched, batch_size))
        for one, other in zip(single, batched, strict=True):
            assert one.output == other.output
            assert (one.rounds, one.accepted_at) == (other.rounds, other.accepted_at)


def test_one_target_pass_per_round_for_all_rows(llama, trained):
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=COUNT, stop_token_ids=()), llama, row) for row, prompt in enumerate(PROMPTS)
    ]
    for drafter in (trained, None):
        before, rounds = llama.forwards, list(decode(llama, drafter, requests, batch_size=4))
        assert llama.forwards - before == len(rounds)
        assert sum(round.prefill for round in rounds) == len(PROMPTS)
        requests = [
            Request(p, SamplingParams(max_new_tokens=COUNT, stop_token_ids=()), llama, row) for row, p in enumerate(PROMPTS)
        ]


def test_sampled_output_equals_autoregressive_with_the_same_seed(llama, trained, answers):
    """The noise is keyed by (seed, row, position): draft, block and tree cannot change a seeded output."""
    settings = dict(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=11)
    alone = [request.output for request in run(llama, None, PROMPTS, batch_size=4, **settings)]
    assert len({tuple(output) for output in alone}) == len(PROMPTS)
    for kind in ("random", "trained", "always-right", "stop-emitting", "tree"):
        for block_size, batch_size in ((2, 4), (8, 1), (16, 3)):
            drafter = make(kind, llama, trained, answers)
            drafted = run(llama, drafter, PROMPTS, block_size, batch_size, **settings)
            assert [request.output for request in drafted] == alone
    other = run(llama, None, PROMPTS, batch_size=4, **{**settings, "seed": 12})
    assert [request.output for request in other] != alone


def test_rows_with_one_seed_have_their_own_noise(llama):
    requests = run(llama, None, [PROMPTS[0]] * 3, batch_size=3, temperature=1.0, seed=5)
    assert len({tuple(request.output) for request in requests}) == 3


def test_repetition_penalty_sees_the_rounds_own_tokens(llama, reference, trained):
    """T27: at each position the penalty is that of the position's true prefix."""
    for prompt in PROMPTS:
        expected = tiny.greedy(reference, prompt, COUNT, repetition_penalty=1.7)
        assert expected != tiny.greedy(reference, prompt, COUNT)
        right = knowing({tuple(prompt): expected})
        for drafter in (right, Bushy(right.guess), trained, None):
            assert run(llama, drafter, [prompt], repetition_penalty=1.7)[0].output == expected


def test_a_target_that_says_the_mask_token_keeps_it(llama, reference):
    """T7: the mask id is an ordinary token in the output."""
    prompt = tiny.prompt(7, 70)
    expected = tiny.greedy(reference, prompt, COUNT)
    drafter = random_drafter(llama, mask_token_id=expected[4])
    assert run(llama, drafter, [prompt])[0].output == expected


@pytest.mark.parametrize("extra", [0, 1, 2, 9])
def test_at_the_context_limit_the_block_shrinks(extra):
    """T6: prompt + answer fill the context exactly; learned positions end there (GPT-2)."""
    for family in ("gpt2", "llama"):
        target, plain = tiny.target(family, max_position_embeddings=40), tiny.model(family, max_position_embeddings=40)
        prompt = tiny.prompt(40 - 1 - extra, extra)
        expected = tiny.greedy(plain, prompt, extra + 1)
        for drafter in (random_drafter(target), knowing({tuple(prompt): expected}), None):
            request = run(target, drafter, [prompt], max_new_tokens=100)[0]
            assert (request.output, request.finish_reason) == (expected, "length")


def test_narrow_rows_beside_wide_ones_at_the_limit():
    target, plain = tiny.target("gpt2", max_position_embeddings=40), tiny.model("gpt2", max_position_embeddings=40)
    prompts = [tiny.prompt(length, length) for length in (38, 20, 36)]
    expected = {tuple(p): tiny.greedy(plain, p, 40 - len(p)) for p in prompts}
    for drafter in (random_drafter(target), knowing(expected), Bushy(knowing(expected).guess)):
        for request in run(target, drafter, prompts, batch_size=3, max_new_tokens=100):
            assert request.output == expected[tuple(request.prompt)]


def test_a_loop_that_takes_unverified_drafts_fails(llama, reference, monkeypatch):
    """The tests above can fail: accept every draft and the output is not the target's."""
    import blockdraft.decoding.decode as module

    monkeypatch.setattr(module, "follow", lambda tokens, parents, choose: (list(range(len(tokens) + 1)), choose(len(tokens), [])))
    request = run(llama, random_drafter(llama), PROMPTS[:1])[0]
    assert request.output != tiny.greedy(reference, PROMPTS[0], COUNT)


def test_bf16_tokens_are_within_epsilon_of_the_best(trained):
    """T5, and a loop that takes the second-best token must fail it."""
    from blockdraft.verification import gaps_to_best, teacher_forced, verify_pair

    target = tiny.target("llama", dtype=torch.bfloat16)
    drafter = random_drafter(target)
    params = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)
    verdict = list(verify_pair(target, drafter, PROMPTS, params))[-1]
    assert verdict.lossless
    assert verdict.rule == "epsilon"
    assert verdict.epsilon is not None
    prompt = PROMPTS[0]
    logits = teacher_forced(target, [*prompt, *tiny.prompt(COUNT, 5)], len(prompt), 1)
    second = logits.topk(2, dim=-1).indices[:, 1].tolist()
    assert float(gaps_to_best(logits, second).max()) > verdict.epsilon


def test_the_method_that_is_named_is_the_one_that_ran(llama):
    """T25: every round has one drafter forward, unless only one token is left to emit; plain decoding has none."""
    from blockdraft.generation import completion

    drafter = random_drafter(llama)
    request = Request(PROMPTS[0], SamplingParams(max_new_tokens=COUNT, ignore_eos=True), llama)
    rounds = [round for round in decode(llama, drafter, [request]) if not round.prefill]
    assert drafter.forwards == request.rounds == len(rounds) > 0
    assert completion(request, llama, drafter).method == "dflash"
    plain = Request(PROMPTS[0], SamplingParams(max_new_tokens=COUNT, ignore_eos=True), llama)
    list(decode(llama, None, [plain]))
    assert drafter.forwards == request.rounds
    assert completion(plain, llama, None).method == "ar"
