"""The loss: chunks against one piece, weights, D-PACE and KL against plain loops, metrics against brute force (T22, T24)."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.engine import kernels as engine
from blockdraft.training import loss as module
from blockdraft.training.config import TrainConfig
from blockdraft.training.loss import LossRule, Words, block_loss, choices, distillation, slot_weights, some_words
from blockdraft.training.metrics import Sums

RULES = {
    "cross entropy": LossRule(),
    "kl": LossRule(ce_weight=0.0, kl_weight=1.0),
    "kl over the best": LossRule(ce_weight=0.3, kl_weight=0.7, kl_top_k=3),
    "d-pace": LossRule(dpace=0.5),
    "capped": LossRule(multiplier=0.5, softcap=3.0),
    "d-pace and kl": LossRule(ce_weight=0.5, kl_weight=0.5, dpace=0.5),
    "kl, capped": LossRule(ce_weight=0.2, kl_weight=0.8, multiplier=0.5, softcap=3.0),
}


def case(blocks: int = 7, slots: int = 5, hidden: int = 8, words: int = 31, seed: int = 0):
    torch.manual_seed(seed)
    valid = torch.rand(blocks, slots) < 0.8
    valid[2] = False
    labels = torch.randint(words, (blocks, slots))
    tensors = torch.randn(blocks, slots, hidden), labels, valid, torch.randn(blocks, slots, hidden)
    return *tensors, Words(torch.randn(words, hidden))


def plain(hidden, labels, valid, teacher, words, rule):
    """The same loss by ordinary autograd over all logits at once, in float64."""
    logits = hidden.double() @ words.weight.double().T * rule.multiplier
    if rule.softcap is not None:
        logits = torch.tanh(logits / rule.softcap) * rule.softcap
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(valid.shape)
    cost = rule.ce_weight * entropy
    if rule.kl_weight:
        p, q = (teacher.double() @ words.weight.double().T).softmax(-1), logits.softmax(-1)
        if rule.kl_top_k:
            best = p.topk(rule.kl_top_k, -1).indices
            p, q = (torch.cat([x.gather(-1, best), 1 - x.gather(-1, best).sum(-1, keepdim=True)], -1) for x in (p, q))
        cost = cost + rule.kl_weight * (p * (p.log() - q.log())).sum(-1)
    return (cost * slot_weights(entropy, valid, rule))[valid].sum()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernel", "autograd"])
def test_chunks_equal_one_piece(kernels, rule, chunk, monkeypatch):
    """Value and gradient, whatever the chunks, by the kernel and by autograd: against float64 autograd."""
    monkeypatch.setattr(engine, "_on", kernels)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", chunk * 4 * 5 * 31)
    hidden, labels, valid, teacher, words = case()
    ours, reference = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    total, weight, entropies, correct = block_loss(ours, labels, valid, teacher, words, rule)
    expected = plain(reference, labels, valid, teacher, words, rule)
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)
    (2 * total).backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, 2 * reference.grad, atol=1e-5, rtol=1e-5)
    counted = slot_weights(entropies, valid, rule).sum() if rule.dpace is None else valid.any(1).sum()
    assert float(weight) == pytest.approx(float(counted))
    assert not bool(correct[~valid].any())


compiled = pytest.mark.skipif(engine.library() is None, reason="no C compiler")


@compiled
@given(
    st.integers(0, 2**31), st.sampled_from([1, 3, 15, 16, 17, 33, 100]), st.sampled_from([0.1, 3.0, 40.0]), st.sampled_from([0, 1])
)
@settings(max_examples=60, deadline=None)
def test_the_kernel_equals_autograd(seed, count, scale, offset):
    """Costs and gradient of rows of any length, flat and peaked, with and without an offset: against float64."""
    torch.manual_seed(seed)
    logits, teacher = torch.randn(2, 5, count) * scale
    labels, hard, soft = torch.randint(count, (5,)), torch.rand(5), torch.rand(5)
    added = torch.where(torch.rand(count) < 0.3, 2.0, 0.0) if offset else None
    exact = logits.double().requires_grad_()
    shifted, wanted = (x if added is None else x + added for x in (exact, teacher.double()))
    entropy = F.cross_entropy(shifted, labels, reduction="none")
    divergence = F.kl_div(shifted.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    (hard * entropy + soft * divergence).sum().backward()
    right = logits.argmax(-1) == labels
    rows = engine.LossRows(engine.library(), logits.clone(), teacher.clone(), added, labels)
    tolerance = {"atol": 3e-6 * max(1.0, scale * 3), "rtol": 1e-5}
    torch.testing.assert_close(rows.entropy.double(), entropy.detach(), **tolerance)
    torch.testing.assert_close(rows.divergence.double(), divergence.detach(), **tolerance)
    assert torch.equal(rows.right, right)
    torch.testing.assert_close(rows.gradients(hard, soft).double(), exact.grad, atol=1e-5, rtol=1e-5)


@compiled
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"labels": torch.tensor([0, 9])}, "a label"),
        ({"labels": torch.tensor([-1, 3])}, "a label"),
        ({"labels": torch.tensor([0, 3], dtype=torch.int32)}, "a label"),
        ({"offset": torch.zeros(9, dtype=torch.float64)}, "float64"),
        ({"offset": torch.zeros(8)}, "over 9 words"),
        ({"logits": torch.zeros(9, 2).t()}, "not contiguous"),
        ({"teacher": torch.zeros(2, 9, dtype=torch.bfloat16)}, "bfloat16"),
    ],
)
def test_the_kernel_reads_and_writes_its_rows_alone(given, told):
    usual = {"logits": torch.zeros(2, 9), "teacher": torch.zeros(2, 9), "offset": None, "labels": torch.tensor([0, 8])}
    engine.LossRows(engine.library(), **usual)
    with pytest.raises((IndexError, RuntimeError), match=told):
        engine.LossRows(engine.library(), **{**usual, **given})


@pytest.mark.parametrize("kernels", [True, False])
def test_the_head_is_multiplied_once(kernels, monkeypatch):
    """By the kernel and without it: one product of the draft and one of the teacher for each chunk."""
    monkeypatch.setattr(engine, "_on", kernels)
    made, right = [], Words.logits
    monkeypatch.setattr(Words, "logits", lambda self, hidden: made.append(1) or right(self, hidden))
    block_loss(*case(), RULES["kl"])
    assert len(made) == 2


def test_numbers_that_are_none_are_not_hidden():
    """A row of NaN, or an infinite logit, costs what is not finite: the trainer stops."""
    for broken in (float("nan"), float("inf")):
        hidden, labels, valid, teacher, words = case()
        hidden[0] = broken
        assert not block_loss(hidden, labels, valid, teacher, words, RULES["d-pace and kl"])[0].isfinite()
        if engine.library() is not None:  # one word that is not the label, in a vector and behind the last one
            for word in (3, 32):
                logits = torch.zeros(1, 33)
                logits[0, word] = broken
                assert not engine.LossRows(engine.library(), logits, None, None, torch.tensor([5])).entropy.isfinite()


def test_no_gradient_is_computed_where_none_is_asked_for():
    hidden, labels, valid, teacher, words = case()
    total, *_ = block_loss(hidden, labels, valid, teacher, words, LossRule())
    assert not total.requires_grad
    assert total.isfinite()


def test_choices_are_the_teachers_whole_vocabulary_in_chunks(monkeypatch):
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 3 * 4 * 31)
    _, _, _, teacher, words = case()
    assert torch.equal(choices(words, teacher), (teacher @ words.weight.T).argmax(-1))


@pytest.mark.parametrize(("block", "gamma", "last"), [(16, 7.0, 0.135), (10, 5.0, 0.202), (8, 4.0, 0.223)])
def test_decay_of_the_paper(block, gamma, last):
    """T24: the weights of the recipe for the paper's block sizes (arXiv 2602.06036, appendix)."""
    assert TrainConfig(block_size=block).slot_decay == gamma
    valid = torch.ones(1, block - 1, dtype=torch.bool)
    weights = slot_weights(torch.zeros(1, block - 1), valid, LossRule(decay=gamma))[0]
    assert float(weights[0]) == 1
    assert float(weights[-1]) == pytest.approx(last, abs=1e-3)


@given(st.integers(0, 2**31), st.integers(1, 7), st.floats(0.1, 1.0))
@settings(max_examples=30, deadline=None)
def test_dpace_equals_a_loop(seed, slots, smoothing):
    torch.manual_seed(seed)
    entropy, valid = torch.rand(3, slots) * 4, torch.rand(3, slots) < 0.7
    weights = slot_weights(entropy.clone().requires_grad_(), valid, LossRule(dpace=smoothing))
    assert not weights.requires_grad  # the gradient stops at the weights
    for block in range(3):
        s = [(1 - smoothing) * math.exp(-float(entropy[block, i])) + smoothing if valid[block, i] else 1.0 for i in range(slots)]
        for j in range(slots):
            expected = sum(math.prod(s[: m + 1]) for m in range(j, slots) if valid[block, m]) if valid[block, j] else 0.0
            assert float(weights[block, j]) == pytest.approx(expected, rel=1e-5)


def test_kl_is_zero_only_for_the_teacher_itself():
    torch.manual_seed(0)
    logits = torch.randn(4, 9)
    for top in (0, 3):
        assert float(distillation(logits, logits + 2.0, top).abs().max()) < 1e-6
        assert bool((distillation(logits, torch.randn(4, 9), top) > 0).all())


def test_some_words_hold_labels_and_frequent_ones():
    torch.manual_seed(0)
    words = Words(torch.randn(200, 8), torch.randn(200))
    labels, frequent = torch.tensor([[190, 3], [3, 77]]), torch.randperm(200)
    some = some_words(words, labels, frequent, 40, torch.Generator().manual_seed(0))
    assert {190, 3, 77, *frequent[:35].tolist()} <= set(some.ids.tolist())
    assert some.ids.tolist() == sorted(set(some.ids.tolist()))
    torch.testing.assert_close(some.weight, words.weight[some.ids])
    torch.testing.assert_close(some.ids[some.index(labels)], labels)
    drawn = some.offset > 0
    assert int(drawn.sum()) == 5
    rest = 200 - (len(some.ids) - 5)
    assert float(some.offset[drawn][0]) == pytest.approx(math.log(rest / 5))


def test_all_words_as_some_words_change_nothing():
    hidden, labels, valid, teacher, words = case()
    some = some_words(words, labels, torch.arange(31), 31 * 2, torch.Generator().manual_seed(0))
    everything = block_loss(hidden, labels, valid, teacher, words, RULES["kl over the best"])
    assert float(block_loss(hidden, labels, valid, teacher, some, RULES["kl over the best"])[0]) == pytest.approx(
        float(everything[0]), rel=1e-5
    )


def test_drawn_words_estimate_the_whole_loss():
    """On average over draws the normaliser over some words is the one over all."""
    torch.manual_seed(0)
    words, hidden = Words(torch.randn(300, 8) * 0.3), torch.randn(1, 4, 8)
    labels = torch.randint(300, (1, 4))
    generator = torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(3000):
        some = some_words(words, labels, torch.arange(50), 80, generator)
        estimates.append((some.logits(hidden) + some.offset).logsumexp(-1).exp())
    whole = words.logits(hidden).logsumexp(-1).exp()
    torch.testing.assert_close(torch.stack(estimates).mean(0), whole, rtol=0.03, atol=0)


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_metrics_equal_brute_force(seed, blocks, slots):
    """T22: ranges, per-block prefixes, empty masks."""
    torch.manual_seed(seed)
    valid = torch.rand(blocks, slots) < 0.7
    right = torch.rand(blocks, slots) < 0.6
    shown = (torch.rand(blocks, slots) < 0.2) & ~valid if seed % 2 else None
    sums = Sums.of(torch.tensor(1.5), torch.tensor(2.0), torch.ones(blocks, slots), right, valid, shown)
    figures = (sums + sums).figures()
    emitted, counted, bare = 0, 0, 0
    for b in range(blocks):
        if not valid[b].any():
            continue
        counted += 1
        if shown is not None and shown[b].any():
            continue  # what was shown cannot be guessed
        bare += 1
        emitted += 1
        for k in range(slots):
            if not (valid[b, k] and right[b, k]):
                break
            emitted += 1
    assert figures["blocks"] == 2 * counted
    assert figures["estimated_tau"] == (pytest.approx(emitted / bare) if bare else None)
    assert figures["loss"] == pytest.approx(0.75)
    for k in range(slots):
        ours, total = figures["accuracy"][k], int(valid[:, k].sum())
        assert (ours is None) == (total == 0)
        assert ours is None or (0 <= ours <= 1 and ours == pytest.approx(int((valid & right)[:, k].sum()) / total))
