"""EAGLE-3 in training is EAGLE-3 in decoding, and nothing reaches a block that decoding would not know."""

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.errors import UsageError
from blockdraft.load import load_drafter, load_target
from blockdraft.training.trainer import Trainer
from blockdraft.training.unrolled import Unrolled
from tests import tiny
from tests.doubles import EAGLE3_TAPS, random_eagle3
from tests.recipes import make_corpus, recipe, sequence_features

BLOCK = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target and a corpus of its answers."""
    folder = tmp_path_factory.mktemp("unrolled")
    tiny.save_folder(folder / "target")
    make_corpus(folder / "corpus", load_target(folder / "target", dtype="float32"), 12)
    return folder


def make(place, out, **changes):
    return Trainer(recipe(place / "target", place / "corpus", out, drafter="eagle3", **changes))


def packed(target, lengths=(30, 18)):
    """Two documents in one row: ids, features, positions, documents, all ``[1, length, ...]``."""
    pieces = [tiny.prompt(length, length) for length in lengths]
    features = torch.cat([sequence_features(target, ids, EAGLE3_TAPS) for ids in pieces], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    return torch.tensor([token for ids in pieces for token in ids])[None], features, positions[None], documents[None]


def outputs(drafter, ids, features, positions, documents, anchors):
    where = anchors[None], positions, documents, BLOCK
    return Unrolled(drafter.network).eval()(drafter.embed(ids), features, *where)[0]


@torch.no_grad()
def test_training_forward_is_decoding_forward(llama):
    """The same logits at every step, fp32, 1e-5: drafting is made to follow the text instead of its own choices."""
    drafter = random_eagle3(llama)
    ids, features, positions, documents = packed(llama)
    anchors = torch.tensor([1, 9, 22, 31, 40])
    trained = drafter.network.lm_head(outputs(drafter, ids, features, positions, documents, anchors))
    for number, anchor in enumerate(anchors.tolist()):
        start = 0 if anchor < 30 else 30
        drafter.reset(1, 80)
        drafter.observe(0, ids[:, start:anchor], features[:, start:anchor], [anchor - start])
        drafter._tokens[0, anchor - start] = ids[0, anchor]
        output = drafter._take(0, [anchor - start - drafter.cache.lengths[0]])
        for step in range(BLOCK - 1):
            torch.testing.assert_close(trained[number, step], drafter.network.logits(output)[0], atol=1e-5, rtol=1e-5)
            output = drafter._extend(ids[:, anchor + step + 1][None], output[:, None], step, None)[:, 0]


@torch.no_grad()
def test_nothing_from_elsewhere_reaches_a_block(llama):
    """Features at or after the anchor, tokens behind the block, another document, another anchor: nothing moves."""
    drafter = random_eagle3(llama)
    ids, features, positions, documents = packed(llama)
    anchors = torch.tensor([9, 20, 38])
    before = outputs(drafter, ids, features, positions, documents, anchors)

    def moved(change_ids=None, change_features=None, which=anchors):
        other_ids, other_features = ids.clone(), features.clone()
        if change_ids is not None:
            other_ids[:, change_ids] = (other_ids[:, change_ids] + 7) % 60
        if change_features is not None:
            other_features[:, change_features] += 3
        return outputs(drafter, other_ids, other_features, positions, documents, which)

    torch.testing.assert_close(moved(change_features=slice(9, 30))[0], before[0])
    torch.testing.assert_close(moved(change_ids=slice(9 + BLOCK - 1, 30))[0], before[0])
    torch.testing.assert_close(moved(slice(0, 30), slice(0, 30))[2], before[2])
    torch.testing.assert_close(moved(which=torch.tensor([9, 12, 38]))[[0, 2]], before[[0, 2]])
    for change in ({"change_features": slice(8, 9)}, {"change_ids": slice(9, 10)}, {"change_ids": slice(3, 4)}):
        assert not torch.allclose(moved(**change)[0], before[0]), "what a block does know moves it"


def test_first_weights(place, tmp_path):
    """The head's rows of the most frequent words, and the last layer where it reads features."""
    trainer = make(place, tmp_path / "run", words=30, init="target")
    network, target = trainer.run.network, trainer.target
    words = network.words()
    assert torch.equal(words, trainer.run.frequent[:30].sort().values)
    assert torch.equal(network.t2d.nonzero()[:, 0], words)
    torch.testing.assert_close(network.lm_head.weight.detach(), target.head.weight[words])
    assert network.config.taps == (0, 1, 3)
    scratch = make(place, tmp_path / "other", words=30, init="scratch").run.network
    assert not torch.allclose(scratch.lm_head.weight, network.lm_head.weight)
    layer, last = network.midlayer, target.layers[-1]
    torch.testing.assert_close(layer.mlp.up_proj.weight.detach(), last.mlp.up_proj.weight)
    torch.testing.assert_close(layer.self_attn.k_proj.weight.detach()[:, target.hidden_size :], last.self_attn.k_proj.weight)


def test_a_run_ends_in_a_drafter_and_goes_on_from_it(place, tmp_path):
    changes = {"max_steps": 12, "learning_rate": 1e-2, "words": 50, "kl_weight": 1.0, "ce_weight": 0.0}
    folder = make(place, tmp_path / "run", **changes).train()
    drafter = load_drafter(folder, load_target(place / "target", dtype="float32"))
    assert (drafter.method, drafter.config.words) == ("eagle3", 50)
    card = (folder / "README.md").read_text()
    assert "An EAGLE-3 drafter" in card
    assert "50 words" in card
    second = make(place, tmp_path / "second", init=str(folder), **{**changes, "max_steps": 2})
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(second.run.network.state_dict()[name].float(), tensor.float())
    with pytest.raises(UsageError, match=r"words is 40, but the drafter in .* has 50"):
        make(place, tmp_path / "third", init=str(folder), **{**changes, "words": 40})


def test_words_outside_of_its_vocabulary_carry_no_loss(place, tmp_path):
    """They end the accepted prefix, and neither hard nor soft labels of theirs move a weight."""
    trainer = make(place, tmp_path / "run", words=2, ce_weight=1.0, kl_weight=1.0)
    batch = trainer.run.batches.batch(trainer.run.batches.step(0), 0)
    labels, valid = batch.narrowed().labels(8)
    known = trainer.run.network.t2d[labels] & valid
    _, sums = trainer.learner.loss(trainer.learner.blocks, batch, trainer.learner.features, 0)
    slot = torch.arange(7)
    assert sums.weight == pytest.approx(float((torch.tensor(0.8) ** slot * known).sum()), rel=1e-5)
    figures = sums.figures()
    assert figures["first_slot"] <= float(known[..., 0].sum() / valid[..., 0].sum())


def test_a_plan_of_an_eagle3_run(place, tmp_path, capsys):
    from blockdraft.cli.main import main

    config = recipe(place / "target", place / "corpus", tmp_path / "run", drafter="eagle3", words=50)
    shown = [f"{key}={'null' if value is None else value}" for key, value in vars(config).items()]
    assert main(["train", *shown, "--plan"]) == 0
    printed = capsys.readouterr().out
    for word in ("eagle3", "50 words", "unrolled for 7 steps", "taps [0, 1, 3]", "1 layer"):
        assert word in printed
