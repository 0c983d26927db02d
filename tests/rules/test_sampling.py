"""SamplingParams, processors in transformers' order, and noise keyed by (seed, row, position)."""

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.errors import UsageError
from blockdraft.rules.sampling import Sampler, SamplingParams, best, counter_uniform, draw
from tests import tiny
from tests.doubles import knowing, random_drafter

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("acceptance", "typical"),
        ("stop", ("a", "")),
        ("stop", "abc"),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(UsageError, match=f"{name} is "):
        SamplingParams(**{name: value})


def test_rejection_without_temperature_is_refused():
    with pytest.raises(UsageError, match="rejection rule needs temperature"):
        SamplingParams(acceptance="rejection")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.4},
    ],
)
def test_scores_are_those_of_transformers(settings, reference):
    """Same processors in the same order as ``generate`` builds them."""
    torch.manual_seed(1)
    logits, prefix = torch.randn(tiny.VOCABULARY) * 3, tiny.prompt(12)
    config = GenerationConfig(
        do_sample=settings.get("temperature", 0) > 0,
        temperature=settings.get("temperature", 1.0) or 1.0,
        top_k=settings.get("top_k", 0),
        top_p=settings.get("top_p", 1.0),
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty", 1.0),
    )
    config._eos_token_tensor = None
    processors = reference._get_logits_processor(config, input_ids_seq_length=12)
    expected = processors(torch.tensor([prefix]), logits[None].clone())[0]
    torch.testing.assert_close(Sampler(SamplingParams(**settings), 0, CPU).scores(logits, prefix), expected)


def test_noise_is_uniform_and_keyed_by_everything():
    keys = [(seed, row, position, stream) for seed in range(4) for row in range(4) for position in range(50) for stream in range(3)]
    numbers = [counter_uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert kstest(numbers, "uniform").pvalue > 1e-3
    assert all(0 <= number < 1 for number in numbers)
    pairs = torch.tensor(numbers).view(-1, 3)
    assert torch.corrcoef(pairs.T).fill_diagonal_(0).abs().max() < 0.1


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**9))
def test_noise_takes_any_seed(seed, position):
    assert 0 <= counter_uniform(seed, 0, position) < 1


def test_draw_follows_the_law_and_never_the_impossible():
    law = torch.tensor([0.0, 0.3, 0.0, 0.5, 0.2, 0.0])
    counts = torch.zeros(6)
    for i in range(5000):
        counts[draw(law, counter_uniform(9, i))] += 1
    assert counts[law == 0].sum() == 0
    assert chisquare(counts[law > 0], law[law > 0] * 5000).pvalue > 1e-4
    assert draw(law, 0.0) == 1
    assert draw(law, 1 - 2**-53) == 4


class Stateful(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


def test_processors_with_state_are_refused(llama):
    params = SamplingParams(max_new_tokens=5, logits_processors=(Stateful(),))
    with pytest.raises(UsageError, match="Stateful keeps state between calls"):
        list(decode(llama, random_drafter(llama), [Request(tiny.prompt(4), params, llama)]))
    with pytest.raises(UsageError, match="no transformers LogitsProcessor"):
        SamplingParams(logits_processors=(lambda ids, scores: scores,))


def test_processors_see_the_true_prefix(llama, reference):
    """T27: an n-gram ban and a suppressed token, with drafts that are all right."""
    prompt = tiny.prompt(6, 9)
    processors = (NoRepeatNGramLogitsProcessor(2), SuppressTokensLogitsProcessor([7], device="cpu"))
    from transformers import LogitsProcessorList

    expected = tiny.greedy(reference, prompt, 40, logits_processor=LogitsProcessorList(processors))
    assert expected != tiny.greedy(reference, prompt, 40)
    for drafter in (knowing({tuple(prompt): expected}), random_drafter(llama), None):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, logits_processors=processors)
        request = Request(prompt, params, llama)
        list(decode(llama, drafter, [request]))
        assert request.output == expected


OPTIONS = {
    "temperature": {"temperature": 1.5},
    "top_k": {"temperature": 1.5, "top_k": 2},
    "top_p": {"temperature": 1.5, "top_p": 0.3},
    "min_p": {"temperature": 1.5, "min_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "seed": {"temperature": 1.5, "seed": 2},
    "acceptance": {"temperature": 1.5, "acceptance": "rejection"},
    "max_new_tokens": {"max_new_tokens": 7},
    "stop_token_ids": {"stop_token_ids": tuple(range(3, 40))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_ignored(name, llama):
    """T26: each option changes the output against the same settings without it."""
    base = {"max_new_tokens": 30, "seed": 1, "stop_token_ids": ()}
    with_option = {**base, **OPTIONS[name]}
    without = {key: value for key, value in with_option.items() if key != name}
    without = {**base, **without} if name not in base else {**without, name: base[name]}
    outputs = []
    for settings in (with_option, without):
        request = Request(tiny.prompt(5, 3), SamplingParams(**settings), llama)
        list(decode(llama, random_drafter(llama), [request]))
        outputs.append(request.output)
    assert outputs[0] != outputs[1]


def test_rounding_swaps_only_near_ties():
    """Over a real vocabulary, scores that differ by rounding choose the same token, unless two perturbed scores nearly tie."""
    torch.manual_seed(0)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), 0, CPU)
    flips = 0
    for position in range(200):
        scores = torch.randn(49_152) * 2
        rounded = scores + (torch.rand(49_152) - 0.5) * 2e-5
        one, other = (sampler.perturbed(s, position) for s in (scores, rounded))
        if one.argmax() != other.argmax():
            flips += 1
            assert float(one.topk(2).values.diff().abs()) < 1e-4
    assert flips <= 1


@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 4.0, 15.0]), st.sampled_from([0.0, 0.5, 0.999]), st.integers(1, 3000))
@hypothesis.settings(max_examples=200, deadline=None)
def test_what_is_drawn_is_the_largest_perturbed_score(seed, spread, banned, size):
    """Flat and steep laws, few and many tokens that are possible: leaving the hopeless ones out changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, generator=generator) * spread
    scores[torch.rand(size, generator=generator) < banned] = float("-inf")
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), seed % 3, CPU)
    for position in range(5):
        assert sampler.drawn(scores, position) == int(best(sampler.perturbed(scores, position)))


def test_scores_of_any_size_are_drawn():
    """A temperature near 0 makes scores at which rounding is larger than the noise; what is no number is never drawn."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), 0, CPU)
    for size in (1e9, 2e13, 1e30):
        scores = torch.tensor([1.0, 0.5, -2.0, float("nan"), float("inf")]) * size
        assert {sampler.drawn(scores, position) for position in range(3000)} == {0}


def test_perturbed_scores_draw_from_their_softmax():
    scores = torch.tensor([0.0, 1.0, float("-inf"), 2.0, 0.5])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=8), 0, CPU)
    counts = torch.zeros(5)
    for position in range(8000):
        counts[int(sampler.perturbed(scores, position).argmax())] += 1
    law = torch.softmax(scores, dim=-1)
    assert counts[2] == 0
    assert chisquare(counts[law > 0], law[law > 0] * 8000).pvalue > 1e-4


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_sampling_options_need_a_temperature(option):
    with pytest.raises(UsageError, match="no effect at temperature 0"):
        SamplingParams(**option)
