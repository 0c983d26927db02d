"""The DFlash drafter: training forward = decoding forward, and who sees whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.dflash2 import Convolution
from blockdraft.drafters.shortlist import Shortlist, read_shortlist, write_shortlist
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.errors import UsageError
from blockdraft.formats.zlab import default_taps, visibility_per_layer
from blockdraft.generation import with_tree
from blockdraft.rules.budget import Budget
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import COUNT, dflash_config, random_drafter, run
from tests.recipes import block_logits, sequence_features

VARIANTS = {
    "full": {},
    "causal": {"causal": (True, True)},
    "sliding causal": {"causal": (True, False), "windows": (6, None)},
    "sliding bidirectional": {"windows": (6, 9)},
    "scaled": {"embedding_scale": 3.0},
    "dflash 2": {"convolution": (2, 8), "selector": (12, 4)},
}


@pytest.fixture(scope="module")
def sequence(llama):
    ids = tiny.prompt(40, 4)
    return torch.tensor(ids), sequence_features(llama, ids, (0, 1, 3))


def decoded_logits(drafter, ids, features, anchor, step=3):
    """Decoding forward on one anchor: the context observed in pieces, then one block."""
    drafter.reset(1, 64)
    for start in range(0, anchor, step):
        stop = min(anchor, start + step)
        drafter.observe(0, ids[None, start:stop], features[:, start:stop], [stop - start])
    return drafter.logits(ids[anchor][None], [drafter.block_size])[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_forward_equals_decoding_forward(variant, llama, sequence):
    """T1: all blocks in one masked forward, or one block over a cache: equal draft logits."""
    ids, features = sequence
    drafter = random_drafter(llama, **VARIANTS[variant])
    anchors = torch.tensor([1, 2, 9, 17, 30])
    together = block_logits(drafter, features, ids, anchors)
    for logits, anchor in zip(together, anchors, strict=True):
        torch.testing.assert_close(logits[1:], decoded_logits(drafter, ids, features, int(anchor)), atol=1e-5, rtol=1e-5)


def test_casts_keep_the_rotary_frequencies(llama):
    """Rounded to bfloat16 they would be off by radians a few hundred positions on, in whatever dtype comes after."""
    network = random_drafter(llama).network
    exact = network.rotary.inv_freq.clone()
    assert not torch.equal(exact, exact.bfloat16().float())
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(network.to(cast).rotary.inv_freq, exact)


@torch.no_grad()
def changed(drafter, ids, features, anchors, documents=None, at=None, token=None):
    """Largest change of each block's logits when the feature of one position or the anchor token of one block changes."""
    before = block_logits(drafter, features, ids, anchors, documents)
    ids, features = ids.clone(), features.clone()
    if at is not None:
        features[:, at] += 1.0
    if token is not None:
        ids[token] = (ids[token] + 1) % tiny.VOCABULARY
    after = block_logits(drafter, features, ids, anchors, documents)
    return (after - before).abs().amax(-1)  # [anchors, slots]


def test_visibility_by_perturbation(llama, sequence):
    """T2: context before the anchor moves every slot; context from the anchor on, other blocks and documents none."""
    ids, features = sequence
    drafter = random_drafter(llama)
    anchors = torch.tensor([5, 20])
    for at, moved in ((4, [True, True]), (5, [False, True]), (19, [False, True]), (20, [False, False])):
        change = changed(drafter, ids, features, anchors, at=at)
        for block, expected in enumerate(moved):
            assert bool((change[block] > 0).all()) if expected else float(change[block].max()) == 0
    change = changed(drafter, ids, features, anchors, token=5)  # the anchor of block 0
    assert bool((change[0] > 0).all())
    assert float(change[1].max()) == 0
    documents = (torch.arange(40) >= 12).long()
    change = changed(drafter, ids, features, anchors, documents, at=4)
    assert bool((change[0] > 0).all())
    assert float(change[1].max()) == 0


def test_window_and_causality_by_perturbation(llama, sequence):
    ids, features = sequence
    drafter = random_drafter(llama, causal=(True, True), windows=(4, 4))
    change = changed(drafter, ids, features, torch.tensor([20]), at=17)[0]
    assert (change > 0).tolist()[:1] == [True]  # 20 - 17 < 4, and 21 - 17 is not: only slot 0 sees it in a layer
    assert float(changed(drafter, ids, features, torch.tensor([20]), at=10).max()) == 0
    assert float(changed(drafter, ids, features, torch.tensor([20]), at=16).max()) == 0


@given(st.lists(st.integers(0, 39), min_size=1, max_size=4), st.integers(2, 9))
@settings(max_examples=15, deadline=None)
def test_no_row_is_ever_empty(anchors, block_size):
    """Anchor 0 has no context at all: its rows still see their own block, and the logits are finite."""
    target = tiny.target("llama")
    drafter = random_drafter(target)
    ids = tiny.prompt(50, 4)
    features = sequence_features(target, ids, drafter.taps)[:, :40]
    logits = block_logits(drafter, features, torch.tensor(ids), torch.tensor(sorted(anchors)), block_size=block_size)
    assert bool(logits.isfinite().all())


FULL, SLIDING = ["full_attention", "full_attention"], ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("raw", "causal", "windows"),
    [
        ({"layer_types": FULL}, (False, False), (None, None)),
        ({}, (False, False), (None, None)),
        ({"layer_types": SLIDING, "w": 9}, (True, False), (9, None)),
        ({"layer_types": SLIDING, "w": 9, "is_causal": False}, (False, False), (9, None)),
        ({"layer_types": SLIDING, "w": 9, "is_causal": True}, (True, True), (9, None)),
        ({"layer_types": FULL, "is_causal": True}, (True, True), (None, None)),
        ({"layer_types": FULL, "dflash_config": {"causal": True}}, (True, True), (None, None)),
        ({"layer_types": SLIDING, "w": 9, "dflash_config": {"causal": False}}, (False, False), (9, None)),
        ({"layer_types": SLIDING, "w": 9, "is_causal": True, "dflash_config": {"causal": False}}, (True, True), (9, None)),
        ({"layer_types": FULL, "dflash_config": {"use_swa": True, "swa_window_size": 5, "causal": False}}, (False,) * 2, (5, 5)),
        ({"layer_types": FULL, "dflash_config": {"use_swa": False, "swa_window_size": 5}}, (False, False), (None, None)),
    ],
)
def test_causality_table(raw, causal, windows, llama):
    """T15: every spelling of causality and window, and what each layer makes of it."""
    backbone = dflash_config(llama).backbone
    backbone.sliding_window = raw.pop("w", None)
    assert visibility_per_layer(raw, backbone) == (causal, windows)


def test_sliding_layers_without_a_window_are_refused(llama):
    with pytest.raises(UsageError, match="no window in force"):
        visibility_per_layer({"layer_types": SLIDING}, dflash_config(llama).backbone)


def test_layer_types_of_another_depth_are_refused(llama):
    with pytest.raises(UsageError, match="names 3 layers"):
        visibility_per_layer({"layer_types": ["full_attention"] * 3}, dflash_config(llama).backbone)


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 4, [1, 10, 18, 27]),
        (30, 5, [1, 8, 14, 20, 27]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 1, [15]),
    ],
)
def test_default_taps(layers, taps, expected):
    assert default_taps(layers, taps) == expected


def test_a_shortlist_picks_among_its_words_and_changes_no_output(llama, reference, tmp_path):
    """The chain, the tree and the drawn chain over 30 of 67 words."""
    whole = random_drafter(llama)
    ids = torch.tensor([9, 4, *range(10, 67, 2)])
    short = DFlashDrafter(whole.network, llama.embed, llama.head, shortlist=Shortlist.of(ids, llama.head))
    prompt = tiny.prompt(7, 2)
    for drafter in (whole, short):
        drafter.reset(1, 64)
        features = sequence_features(llama, prompt, (0, 1, 3))
        drafter.observe(0, torch.tensor([prompt]), features, [7])
    anchor = torch.tensor([5])
    full = whole.logits(anchor, [8])
    torch.testing.assert_close(short.logits(anchor, [8]), full[..., ids], atol=1e-5, rtol=1e-5)
    expected = ids[full[..., ids].argmax(-1)]
    assert torch.equal(short.propose(anchor, [8], None).tokens, expected)
    logs, words = short.likely(anchor, [8], 64)
    assert torch.equal(words[..., 0], expected)
    assert logs.shape[-1] == 31
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(1, 7))
    for params in ({}, {"temperature": 1.0, "seed": 1}):
        for made in (short, TreeDrafter(short, Budget(None, 8, 20))):
            request = Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True, **params), llama)
            plain = Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True, **params), llama)
            list(decode(llama, made, [request]))
            list(decode(llama, None, [plain]))
            assert request.output == plain.output
    drawn = Request(prompt, SamplingParams(max_new_tokens=20, temperature=1.0, acceptance="rejection", seed=1), llama)
    list(decode(llama, short, [drawn]))
    assert drawn.rounds > 0


def test_a_shortlist_file_is_checked(tmp_path):
    assert read_shortlist(tmp_path, 10) is None
    write_shortlist([3, 1, 2], tmp_path)
    assert read_shortlist(tmp_path, 4).tolist() == [3, 1, 2]
    with pytest.raises(UsageError, match="different ids from 0 to 2"):
        read_shortlist(tmp_path, 3)
    write_shortlist([3, 3], tmp_path)
    with pytest.raises(UsageError, match="different ids"):
        read_shortlist(tmp_path, 9)
    for damaged in ("x", "{}", '{"ids": 3}', '{"ids": [1.5, "a"]}', '{"ids": [99999999999999999999]}', "[]"):
        (tmp_path / "shortlist.json").write_text(damaged)
        with pytest.raises(UsageError, match="damaged or no shortlist"):
            read_shortlist(tmp_path, 9)
    write_shortlist([], tmp_path)
    assert read_shortlist(tmp_path, 9) is None


def test_narrow_rows_do_not_see_padding(llama, sequence):
    """In a ragged batch a narrower row drafts what it drafts alone."""
    ids, features = sequence
    drafter = random_drafter(llama)
    drafter.reset(2, 64)
    for row, length in enumerate((12, 7)):
        drafter.observe(row, ids[None, :length], features[:, :length], [length])
    both = drafter.logits(torch.tensor([5, 6]), [8, 3])
    alone = random_drafter(llama)
    alone.reset(1, 64)
    alone.observe(0, ids[None, :7], features[:, :7], [7])
    torch.testing.assert_close(both[1, :2], alone.logits(torch.tensor([6]), [3])[0], atol=1e-5, rtol=1e-5)


def test_features_may_wait_for_a_draft(llama, sequence):
    """Rounds without a draft leave their features for the next one: the drafts are those of features taken in at once."""
    ids, features = sequence
    ids, features = ids[:40], features[:, :40]
    waiting, eager = random_drafter(llama), random_drafter(llama)
    for drafter in (waiting, eager):
        drafter.reset(2, 64)
        drafter.observe(0, ids[None, :5].expand(2, -1), features[:, :5].expand(2, -1, -1), [5, 3])
    for start, counts in ((5, [1, 2]), (7, [3, 1]), (10, [1, 1])):
        chunk = features[:, start : start + max(counts)].expand(2, -1, -1)
        for drafter in (waiting, eager):
            drafter.observe(0, ids[None, start : start + max(counts)].expand(2, -1), chunk, counts)
        eager.logits(ids[:2], [8, 8])
    torch.testing.assert_close(waiting.logits(ids[20:22], [8, 8]), eager.logits(ids[20:22], [8, 8]), atol=1e-5, rtol=1e-5)
    assert waiting.cache.lengths == eager.cache.lengths == [10, 7]


def test_features_of_padding_are_forgotten(llama, sequence):
    """Ragged observations: rows beyond their counts leave no trace."""
    ids, features = sequence
    drafter = random_drafter(llama)
    drafter.reset(2, 64)
    pair = torch.cat([features[:, :6], features[:, 10:16]])
    drafter.observe(0, torch.stack([ids[:6], ids[10:16]]), pair, [6, 2])
    drafter.logits(ids[:2], [2, 2])
    assert drafter.cache.lengths == [6, 2]
    drafter.observe(1, ids[None, 12:14], features[:, 12:14], [2])
    alone = random_drafter(llama)
    alone.reset(1, 64)
    alone.observe(0, ids[None, 10:14], features[:, 10:14], [4])
    torch.testing.assert_close(
        drafter.logits(torch.tensor([5, 6]), [8, 8])[1], alone.logits(torch.tensor([6]), [8])[0], atol=1e-5, rtol=1e-5
    )


def test_convolutions_stay_inside_their_block():
    """Several blocks side by side are each convolved as if alone; the initial weights change nothing."""
    torch.manual_seed(0)
    conv = Convolution(16, 3, 4)
    x = torch.randn(2, 12, 16)
    before, behind = conv(x, 4)
    torch.testing.assert_close(before, x)
    torch.testing.assert_close(behind(x), x)
    with torch.no_grad():
        conv.base_kernel.normal_()
        conv.kernel_projection.weight.normal_()
    before, behind = conv(x, 4)
    for start in (0, 4, 8):
        alone, after = conv(x[:, start : start + 4])
        torch.testing.assert_close(before[:, start : start + 4], alone)
        torch.testing.assert_close(behind(x)[:, start : start + 4], after(x[:, start : start + 4]))
    moved = x.clone()
    moved[:, 5] += 1
    assert torch.equal(conv(moved, 4)[0][:, :5], before[:, :5]), "causal: later slots move nothing"


@torch.no_grad()
def test_features_that_wait_follow_their_rows(llama):
    """A few observed tokens wait for the next draft: a row that moves, or goes back, meanwhile drafts as if they had not."""
    drafter, plain = random_drafter(llama), random_drafter(llama)
    ids = torch.stack([torch.tensor(tiny.prompt(20, seed)) for seed in range(3)])
    features = torch.randn(3, 20, 3 * llama.hidden_size)
    drafter.reset(3, 60)
    for row in range(3):
        drafter.observe(row, ids[row : row + 1, :12], features[row : row + 1, :12], [12])
    drafter.observe(0, ids[:, 12:16], features[:, 12:16], [4, 2, 3])  # waits
    drafter.observe(0, ids[:, 16:18], features[:, 16:18], [1, 1, 2])  # waits too
    assert any(drafter.context._waiting)
    drafter.move(2, 0)  # the first row is finished, the last one takes its place
    drafter.truncate(1, 13)
    ours = drafter.propose(ids[[2, 1], 19], [8, 8], None).tokens
    plain.reset(2, 60)
    kept = torch.cat([features[2:, :12], features[2:, 12:15], features[2:, 16:18]], dim=1)
    plain.context._inject(0, kept, [17])
    plain.context._inject(1, features[1:2, :13], [13])
    assert torch.equal(ours, plain.propose(ids[[2, 1], 19], [8, 8], None).tokens)


SECOND = VARIANTS["dflash 2"]


def lossless_chain(llama, reference, drafter):
    """Greedy and seeded output of ragged rows is the target's own, and the drafter stays a chain."""
    prompts = [tiny.prompt(length, length) for length in (9, 3, 14)]
    for request in run(llama, drafter, prompts, 2):
        assert request.output == tiny.greedy(reference, request.prompt, COUNT)
    how = {"temperature": 0.9, "seed": 3}
    for drafted, plain in zip(run(llama, drafter, prompts, 2, **how), run(llama, None, prompts, **how), strict=True):
        assert drafted.output == plain.output
    assert with_tree(llama, drafter, "auto") is drafter


def test_a_dflash_2_is_lossless_and_a_chain(llama, reference):
    """Greedy, seeded sampling and ragged rows; it has no tree, and says so."""
    drafter = random_drafter(llama, **SECOND)
    lossless_chain(llama, reference, drafter)
    with pytest.raises(UsageError, match="it has no tree"):
        with_tree(llama, drafter, 16)


def test_denoising_keeps_the_most_certain_slots(llama):
    """Two passes over seven slots: three stay after the first, and the others are filled anew knowing them."""
    drafter = random_drafter(llama)
    twice, ids = drafter.with_denoising(2), torch.tensor([tiny.prompt(9, 1)])
    features, anchor = torch.randn(1, 9, 3 * llama.hidden_size), torch.tensor([5])
    for each in (drafter, twice):
        each.reset(1, 60)
        each.observe(0, ids, features, [9])
    logits = drafter.logits(anchor, [8])[0]
    kept = logits.softmax(-1).amax(-1).topk(3).indices
    known = torch.full((1, 7), drafter.config.mask_token_id)
    known[0, kept] = logits.argmax(-1)[kept]
    again = drafter._logits(drafter._hidden(anchor, [8], known))[0].argmax(-1)
    again[kept] = known[0, kept]
    assert twice.propose(anchor, [8], None).tokens[0].tolist() == again.tolist()
    assert again.tolist() != logits.argmax(-1).tolist()
    assert twice.forwards == 2


def test_several_denoising_steps_are_lossless_and_a_chain(llama, reference):
    drafter = random_drafter(llama).with_denoising(3)
    lossless_chain(llama, reference, drafter)
    assert drafter.method == "dflash:3"
    for arguments, sentence in (
        ((16,), "several denoising steps chooses each word knowing others"),
        (("auto", None, "rejection"), "which the rejection rule does not allow"),
    ):
        with pytest.raises(UsageError, match=sentence):
            with_tree(llama, drafter, *arguments)
    for steps in (0, 8):
        with pytest.raises(UsageError, match=f"denoising steps are {steps}; they must be from 1 to 7"):
            drafter.with_denoising(steps)
    with pytest.raises(UsageError, match="it has one denoising step"):
        random_drafter(llama, **SECOND).with_denoising(2)


def test_the_selectors_laws_are_those_it_draws_from(llama):
    """Under the rejection rule: each slot's law is over its candidates, given the word drawn before."""
    drafter = random_drafter(llama, **SECOND)
    drafter.reset(1, 60)
    ids = torch.tensor([tiny.prompt(9, 1)])
    drafter.observe(0, ids, torch.randn(1, 9, 3 * llama.hidden_size), [9])
    asked = []

    def draw(logits):
        asked.append(logits)
        laws = logits.softmax(-1)
        return laws.topk(2, -1).indices[..., 1], laws

    proposal = drafter.propose(torch.tensor([5]), [8], draw)
    assert proposal.probabilities.shape == (1, 7, llama.vocab_size)
    assert bool(((proposal.probabilities > 0).sum(-1) <= 4).all())
    for slot in range(1, 7):  # what was asked for earlier slots never changes
        torch.testing.assert_close(asked[slot][:, :slot], asked[slot - 1])
    assert proposal.tokens[0].tolist() == proposal.probabilities[0].topk(2, -1).indices[:, 1].tolist()
