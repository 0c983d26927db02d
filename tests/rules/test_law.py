"""T8: at temperature > 0 the joint law of three emitted tokens is the target's, by enumeration of a tiny vocabulary."""

import itertools

import pytest
from scipy.stats import chisquare

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.rules.sampling import Sampler, SamplingParams
from tests import tiny
from tests.doubles import Bushy, Scripted, random_drafter

VOCABULARY, LENGTH, SAMPLES = 5, 3, 1200
PROMPT = [3, 1, 4]
SETTINGS = {
    "temperature": {"temperature": 1.3},
    "top-k and top-p": {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
    "everything": {"temperature": 0.8, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def small():
    return tiny.target("llama", seed=4, vocab_size=VOCABULARY, initializer_range=0.25, pad_token_id=None)


def exact_law(target, params):
    """Probability of every sequence of three tokens, by running each prefix through the target."""
    sampler, law = Sampler(params, 0, target.device), {}
    for first, second in itertools.product(range(VOCABULARY), repeat=2):
        ids, probability = list(PROMPT), []
        for token in (first, second, None):
            for logits, _ in target.prefill(target.new_cache(1, 8), 0, ids):
                step = sampler.law(logits, ids)
            probability.append(step if token is None else float(step[token]))
            if token is not None:
                ids.append(token)
        for third in range(VOCABULARY):
            law[first, second, third] = probability[0] * probability[1] * float(probability[2][third])
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    return law


def p_value(law, samples):
    """Chi-square over the sequences, rare ones pooled; 0 if an impossible one appeared."""
    counts = dict.fromkeys(law, 0)
    for sample in samples:
        counts[sample] += 1
    if any(law[key] < 1e-9 and count for key, count in counts.items()):
        return 0.0
    expected = {key: probability * len(samples) for key, probability in law.items()}
    common = [key for key in law if expected[key] >= 8]
    observed = [counts[key] for key in common] + [len(samples) - sum(counts[key] for key in common)]
    wanted = [expected[key] for key in common] + [len(samples) - sum(expected[key] for key in common)]
    if wanted[-1] < 8:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return chisquare(observed, wanted, sum_check=False).pvalue


def samples(target, drafter, settings, count=SAMPLES):
    """Outputs of ``count`` rows: the row number keys the noise, so one seed gives them all."""
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, seed=5, **settings)
    requests = [Request(PROMPT, params, target, row) for row in range(count)]
    rounds = list(decode(target, drafter, requests, batch_size=250))
    assert drafter is None or any(sum(round.accepted) for round in rounds)
    return [tuple(request.output) for request in requests]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("method", ["ar", "match", "match tree", "rejection"])
def test_the_joint_law_is_the_targets(method, settings, small):
    chosen = dict(SETTINGS[settings])
    guesses = Scripted(lambda ids, count: [(ids[-1] * 2 + i) % VOCABULARY for i in range(count)], block_size=4)
    drafter = {"ar": None, "match": guesses, "match tree": Bushy(guesses.guess, 4)}.get(method)
    if method == "rejection":
        drafter = random_drafter(small, block_size=4)
        chosen["acceptance"] = "rejection"
    if method == "match tree":
        drafter = Small(guesses.guess, 4)
    assert p_value(exact_law(small, SamplingParams(**chosen)), samples(small, drafter, chosen)) > 1e-4


class Small(Bushy):
    """The random tree with all tokens inside the tiny vocabulary."""

    def propose(self, anchors, widths, draw):
        proposal = super().propose(anchors, widths, draw)
        proposal.tokens %= VOCABULARY
        return proposal


def test_broken_rules_fail(small, monkeypatch):
    """The same test at the same size catches a rule that favours drafts, and one that redraws from p."""
    import blockdraft.decoding.decode as module

    settings = {"temperature": 1.3, "acceptance": "rejection"}
    law = exact_law(small, SamplingParams(**settings))
    drafter = random_drafter(small, block_size=4)
    own = module.reject
    monkeypatch.setattr(module, "reject", lambda tokens, q, p, accept, redraw: own(tokens, q, p, lambda i: accept(i) * 0.5, redraw))
    assert p_value(law, samples(small, drafter, settings)) < 1e-4
    monkeypatch.setattr("blockdraft.rules.accept.residual", lambda p, q: p.double())
    monkeypatch.setattr(module, "reject", own)
    assert p_value(law, samples(small, drafter, settings)) < 1e-4


def test_a_wrong_temperature_fails(small):
    law = exact_law(small, SamplingParams(temperature=1.3))
    assert p_value(law, samples(small, None, {"temperature": 0.8})) < 1e-4


def test_a_seed_reproduces_and_its_absence_does_not(small):
    drafter = random_drafter(small, block_size=4)
    for acceptance in ("match", "rejection"):
        settings = {"temperature": 1.0, "acceptance": acceptance}
        assert samples(small, drafter, settings, 40) == samples(small, drafter, settings, 40)
    params = SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True)
    first, second = (Request(PROMPT, params, small) for _ in range(2))
    for request in (first, second):
        list(decode(small, None, [request]))
    assert first.sampler.seed != second.sampler.seed
    assert first.output != second.output
