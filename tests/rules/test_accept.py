"""Acceptance alone, on random numbers: no model in sight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from blockdraft.rules.accept import follow, reject, residual
from blockdraft.rules.sampling import counter_uniform, draw


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_a_chain_is_followed_to_its_first_mismatch(tokens, choices):
    path, bonus = follow(tokens, None, lambda node, emitted: choices[node])
    agreed = next((i for i, (a, b) in enumerate(zip(tokens, choices, strict=False)) if a != b), len(tokens))
    assert path == list(range(agreed + 1))
    assert bonus == choices[agreed]


@given(st.data())
def test_a_tree_is_followed_as_brute_force_does(data):
    count = data.draw(st.integers(0, 10))
    parents = [data.draw(st.integers(0, i)) for i in range(count)]
    tokens = [data.draw(st.integers(0, 2)) for _ in range(count)]
    choices = [data.draw(st.integers(0, 2)) for _ in range(count + 1)]
    path, bonus = follow(tokens, parents, lambda node, emitted: choices[node])
    node, expected = 0, [0]
    while True:
        children = [i + 1 for i in range(count) if parents[i] == node and tokens[i] == choices[node]]
        if not children:
            break
        node = children[0]
        expected.append(node)
    assert (path, bonus) == (expected, choices[node])


def test_follow_hands_over_the_path_so_far():
    seen = []

    def choose(node, emitted):
        seen.append((node, list(emitted)))
        return 7 if node < 2 else 1

    assert follow([7, 7, 7], None, choose) == ([0, 1, 2], 1)
    assert seen == [(0, []), (1, [7]), (2, [7, 7])]


def law(*weights):
    weights = torch.tensor(weights, dtype=torch.float32)
    return weights / weights.sum()


PAIRS = {
    "far": (law(5, 1, 1, 3), law(1, 4, 4, 1)),
    "equal": (law(5, 1, 1, 3), law(5, 1, 1, 3)),
    "one ulp apart": (law(5, 1, 1, 3), law(5, 1, 1, 3) * (1 + 2**-23)),
    "holes in p": (law(5, 0, 2, 0), law(1, 1, 1, 1)),
    "holes in q": (law(2, 3, 1, 1), law(0, 1, 0, 1)),
    "disjoint": (law(1, 0, 1, 0), law(0, 1, 0, 1)),
    "one-hot q": (law(5, 1, 1, 3), law(0, 0, 1, 0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_rejection_emits_the_target_law(name):
    """T8 on one position: chi-square of 20,000 emitted tokens against p; a token that p forbids never appears."""
    p, q = PAIRS[name]
    counts = torch.zeros(4)
    for i in range(20_000):
        drafted = draw(q, counter_uniform(1, i))
        path, bonus = reject(
            [drafted],
            q[None],
            lambda node, emitted: p,
            lambda j, i=i: counter_uniform(2, i),
            lambda j, i=i: counter_uniform(3, i, j),
        )
        counts[drafted if len(path) == 2 else bonus] += 1
    assert counts[p == 0].sum() == 0
    allowed = p > 0
    assert chisquare(counts[allowed], p[allowed] * 20_000).pvalue > 1e-4


def test_a_broken_rule_fails_the_same_test():
    """Redrawing from p instead of the residual is caught at this sample size."""
    p, q = PAIRS["far"]
    counts = torch.zeros(4)
    for i in range(20_000):
        drafted = draw(q, counter_uniform(1, i))
        stands = counter_uniform(2, i) * float(q[drafted]) < float(p[drafted])
        counts[drafted if stands else draw(p, counter_uniform(3, i))] += 1
    assert chisquare(counts, p * 20_000).pvalue < 1e-12


def test_residual_never_vanishes():
    p = law(1, 2, 3)
    assert torch.equal(residual(p, p), p.double())
    assert residual(p, p * (1 + 2**-23)).sum() > 0
    assert torch.equal(residual(law(1, 1, 0), law(0, 1, 1)) > 0, torch.tensor([True, False, False]))
