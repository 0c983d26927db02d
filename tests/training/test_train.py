"""The trainer: it learns, a wrong one does not, and neither kill, split nor backend changes what is learnt."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import tracking
from safetensors.torch import load_file

from blockdraft.cli.main import main
from blockdraft.drafters import injection
from blockdraft.engine.attention import BlockedMask
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.load import load_drafter, load_target
from blockdraft.training import augment, learner, unrolled
from blockdraft.training import trainer as module
from blockdraft.training.batches import Batch
from blockdraft.training.blocks import Blocks
from blockdraft.training.config import TrainConfig
from blockdraft.training.data.corpus import identity
from blockdraft.training.evaluate import as_drafter, decode_held_out
from blockdraft.training.initial import plain_norm
from blockdraft.training.optimizer import rate_share
from blockdraft.training.trainer import Trainer
from tests import tiny
from tests.recipes import KINDS, make_corpus, recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target and a corpus of its answers."""
    folder = tmp_path_factory.mktemp("train")
    tiny.save_folder(folder / "target")
    make_corpus(folder / "corpus", load_target(folder / "target", dtype="float32"))
    return folder


def make(place, out, **changes):
    return Trainer(recipe(place / "target", place / "corpus", out, **changes))


def steps(trainer, count):
    """``count`` steps; their losses per weight."""
    losses = []
    for _ in range(count):
        losses.append(trainer.learner.step(trainer.step)[0].figures()["loss"])
        trainer.step += 1
    return losses


def weights(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.run.network.state_dict().items()}


def real_tau(trainer):
    """Acceptance length of real decoding on prompts of the training documents."""
    drafter = as_drafter(trainer.run.network, weights(trainer), trainer.target)
    return decode_held_out(trainer.target, drafter, trainer.run.documents.train[:8], 25).tau


# ---- it learns, and a wrong trainer fails the same test


def shifted_labels(monkeypatch):
    right = Batch.labels

    def labels(self, block_size):
        moved = dataclasses.replace(self, ids=self.ids.roll(-1, 1))
        return right(moved, block_size)

    monkeypatch.setattr(Batch, "labels", labels)


def shifted_features(monkeypatch):
    right = learner.Features.rows

    def rows(self, batch):
        features, last = right(self, batch)
        return features.roll(1, 1), last

    monkeypatch.setattr(learner.Features, "rows", rows)


def causal_mask(monkeypatch):
    right = Blocks._masks

    def masks(self, visibility, dtype):
        seen = visibility.seen
        visibility.seen = lambda causal, window: seen(True, window)
        return right(self, visibility, dtype)

    monkeypatch.setattr(Blocks, "_masks", masks)


def forgotten_steps(monkeypatch):
    """A step does not see the drafted tokens before it."""
    right = BlockedMask.__init__

    def init(self, context, own):
        own = own.clone()
        own[..., :-1] = float("-inf")
        right(self, context, own)

    monkeypatch.setattr(unrolled, "BlockedMask", type("Forgetful", (BlockedMask,), {"__init__": init}))


def leaking_mask(monkeypatch):
    right = Blocks._masks

    def masks(self, visibility, dtype):
        visibility.anchors = visibility.anchors + 4  # context up to four tokens behind the anchor is seen
        return right(self, visibility, dtype)

    monkeypatch.setattr(Blocks, "_masks", masks)


FAULTS = {
    "labels shifted by one": shifted_labels,
    "features shifted by one": shifted_features,
    "causal mask": causal_mask,
    "mask that shows the future": leaking_mask,
}
EAGLE3_FAULTS = {
    "labels shifted by one": shifted_labels,
    "features shifted by one": shifted_features,
    "steps that do not see each other": forgotten_steps,
}
OVERFIT = {
    "dflash": {"max_steps": 300, "learning_rate": 1e-2},
    "eagle3": {"max_steps": 150, "learning_rate": 2e-2, "kl_weight": 0.1, "anchors": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_target_is_overfitted(kind, place, tmp_path):
    """T21: the real acceptance length, not the estimate, comes above 0.95 B on what was trained on."""
    trainer = make(place, tmp_path / "run", drafter=kind, **OVERFIT[kind])
    losses = steps(trainer, trainer.run.steps)
    assert losses[-1] < 0.2 * losses[0]
    assert real_tau(trainer) > 0.95 * 8


CASES = [*(("dflash", fault) for fault in FAULTS), *(("eagle3", fault) for fault in EAGLE3_FAULTS)]


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=[f"{kind}, {fault}" for kind, fault in CASES])
def test_a_wrong_trainer_fails_that_test(kind, fault, place, tmp_path, monkeypatch):
    (FAULTS if kind == "dflash" else EAGLE3_FAULTS)[fault](monkeypatch)
    trainer = make(place, tmp_path / "run", drafter=kind, **OVERFIT[kind])
    steps(trainer, trainer.run.steps)
    assert real_tau(trainer) < 0.95 * 8


def test_the_teacher_stands_one_before_its_label(place, tmp_path):
    """Where the target wrote greedily, what its head read chose the very token that is the label."""
    trainer = make(place, tmp_path / "run", kl_weight=1.0)
    batch = trainer.run.batches.batch(trainer.run.batches.step(0), 0)
    labels, valid = batch.labels(8)
    teacher = learner.behind(trainer.learner.features.rows(batch)[1], batch, 8)
    assert torch.equal(learner.choices(trainer.run.words, teacher)[valid], labels[valid])


def test_revealed_slots_are_shown_and_carry_no_loss(place, tmp_path, monkeypatch):
    """Some blocks show some of their own tokens; what is shown is not learnt, and everything is a function of seed and row."""
    trainer = make(place, tmp_path / "run", revealed=0.5, anchors=20)
    batch = trainer.run.batches.batch(trainer.run.batches.step(0), 0)
    shown = augment.revealed(batch, 8, 0.5, 0)
    assert torch.equal(shown, augment.revealed(batch, 8, 0.5, 0))
    share = shown.any(-1).float().mean()
    assert 0.25 < float(share) < 0.6
    assert not bool(augment.revealed(batch, 8, 0.0, 0).any())
    seen = {}
    right = learner.block_embeddings

    def embeddings(network, embed, ids, anchors, block_size, shown=None):
        seen["ids"] = right(network, lambda tokens: tokens[..., None].float(), ids, anchors, block_size, shown)[..., 0].long()
        return right(network, embed, ids, anchors, block_size, shown)

    monkeypatch.setattr(learner, "block_embeddings", embeddings)
    _, sums = trainer.learner.loss(trainer.learner.blocks.train(), batch, trainer.learner.features, 0)
    labels, valid = batch.labels(8)
    tokens = seen["ids"].view(*labels.shape[:2], 8)[..., 1:]
    shown &= valid
    assert torch.equal(tokens[shown], labels[shown])
    assert bool((tokens[~shown] == trainer.run.network.config.mask_token_id).all())
    decay = torch.exp(-torch.arange(7) / 4)
    assert sums.weight == pytest.approx(float((decay * (valid & ~shown)).sum()), rel=1e-5)


# ---- nothing changes what is learnt


def test_a_killed_run_goes_on_to_the_bit(place, tmp_path):
    """T20: N steps = some + kill -9 + the rest: losses and weights equal to the bit, order and noise included."""
    changes = {"max_steps": 40, "checkpoint_every": 10, "log_every": 5, "feature_noise": 0.1, "dropout": 0.1, "evaluate_every": 20}
    command = [sys.executable, "-m", "blockdraft", "train", "config.yaml"]
    for name in ("whole", "killed"):
        config = recipe(place / "target", place / "corpus", tmp_path / name, **changes)
        (tmp_path / f"{name}.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in vars(config).items()))
    subprocess.run([*command[:-1], tmp_path / "whole.yaml"], check=True, capture_output=True)
    killed = subprocess.Popen([*command[:-1], tmp_path / "killed.yaml"], stderr=subprocess.PIPE)
    deadline = time.time() + 120
    while not list((tmp_path / "killed").glob("checkpoints/step-*10/state.json")) and time.time() < deadline:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run([*command[:-1], tmp_path / "killed.yaml"], check=True, capture_output=True)

    def learnt(name):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        entries = [{k: v for k, v in json.loads(line).items() if k != "blocks_per_second"} for line in lines]
        return entries, load_file(tmp_path / name / "checkpoints" / "step-00000040" / "model.safetensors")

    (entries, tensors), (entries_again, tensors_again) = learnt("whole"), learnt("killed")
    assert [entry["step"] for entry in entries] == [5, 10, 15, 20, 20, 25, 30, 35, 40, 40]
    assert entries == entries_again
    assert all(torch.equal(tensors[name], tensors_again[name]) for name in tensors)
    drafter, drafter_again = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(tensor, drafter_again[name]) for name, tensor in drafter.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stores_where_it_was(number, place, tmp_path, monkeypatch):
    changes = {"max_steps": 9, "checkpoint_every": 100}
    whole = make(place, tmp_path / "whole", **changes)
    whole.train()
    trainer = make(place, tmp_path / "run", **changes)
    right = trainer._step

    def step():
        if trainer.step == 4:
            os.kill(os.getpid(), number)
        return right()

    monkeypatch.setattr(trainer, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.checkpoints.steps() == [5]
    assert "Step 5 of 9, the newest." in (tmp_path / "run" / "drafter" / "README.md").read_text()
    load_drafter(tmp_path / "run" / "drafter", trainer.target)
    again = make(place, tmp_path / "run", **changes)
    again.train()
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(whole).items())


SPLITS = [
    {"micro_rows": 1},
    {"micro_rows": 3},
    {"features": "memory"},
    {"features": "disk"},
    {"drafter": "eagle3", "micro_rows": 1},
]


@pytest.mark.parametrize("changes", SPLITS, ids=str)
def test_splits_and_kept_features_change_nothing(changes, place, tmp_path):
    """A batch in pieces, or features kept since the first epoch: the same losses to 1e-6 of their size."""
    common = {"max_steps": 12, "kl_weight": 0.5, "feature_noise": 0.1, "drafter": changes.get("drafter", "dflash")}
    one, other = make(place, tmp_path / "a", **common), make(place, tmp_path / "b", **{**common, **changes})
    torch.testing.assert_close(steps(one, 12), steps(other, 12), rtol=1e-6, atol=1e-6)
    if changes.get("features") == "disk":
        other.learner.features.flush()
        third = make(place, tmp_path / "b", **{**common, **changes})
        third.learner.features._compute = None  # another process computes nothing
        for ours, theirs in zip(third.learner.features.of(range(16)), one.learner.features.of(range(16)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_bfloat16_products_learn_the_same(place, tmp_path):
    """Weights and losses stay float32; the losses of the first steps are those of float32 within a few per cent."""
    common = {"max_steps": 12, "kl_weight": 0.5}
    exact, rough = make(place, tmp_path / "a", **common), make(place, tmp_path / "b", precision="bfloat16", **common)
    for one, other in zip(steps(exact, 12), steps(rough, 12), strict=True):
        assert one != other
        assert one == pytest.approx(other, rel=0.03)
    assert all(tensor.dtype == torch.float32 for tensor in weights(rough).values())


def test_a_reduced_vocabulary_and_compiled_layers_learn_too(place, tmp_path, monkeypatch):
    reduced = make(place, tmp_path / "a", max_steps=60, vocabulary=40, learning_rate=1e-2)
    losses = steps(reduced, 60)
    assert losses[-1] < 0.6 * losses[0]
    # Traced, and run as traced: generating code for it takes a minute, and is tested on GPUs.
    right = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: right(self, backend="aot_eager"))
    plain, compiled = make(place, tmp_path / "b"), make(place, tmp_path / "c", compile=True)
    torch.testing.assert_close(steps(plain, 3), steps(compiled, 3), rtol=1e-4, atol=1e-4)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SHARED = [("dflash", {}), ("dflash", FSDP), ("eagle3", FSDP)]


@pytest.mark.parametrize(("kind", "sharding"), SHARED, ids=["dflash ddp", "dflash fsdp2", "eagle3 fsdp2"])
def test_two_processes_equal_one(kind, sharding, place, tmp_path):
    """The loss is normalised over the global batch, and metrics are reduced once."""
    changes = {"drafter": kind, "max_steps": 8, "log_every": 1, "learning_rate": 1e-3, "optimizer": "adamw", "evaluate_every": 8}
    one = make(place, tmp_path / "one", **changes)
    one.train()
    config = recipe(place / "target", place / "corpus", tmp_path / "two", **changes)
    arguments = [f"{key}={json.dumps(value)}" for key, value in vars(config).items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    launch += ["--master_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **sharding}
    done = subprocess.run([*launch, "-m", "blockdraft.training", *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]

    def losses(name):
        entries = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert {e["processes"] for e in entries if "loss" in e} == {1 if name == "one" else 2}
        return [(e["step"], e["loss"], e["blocks"], *e["accuracy"], e["gradient_norm"]) for e in entries if "loss" in e]

    assert len(losses("two")) == 8
    torch.testing.assert_close(losses("one"), losses("two"), rtol=1e-5, atol=1e-5)
    ours, theirs = (load_file(tmp_path / name / "checkpoints" / "step-00000008" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def test_processes_do_not_share_one_named_gpu(place, tmp_path, monkeypatch):
    part = SimpleNamespace(num_processes=2, process_index=1, device="cuda:1")
    monkeypatch.setattr(module, "Accelerator", lambda **_: part)
    with pytest.raises(UsageError, match="device is cuda; accelerate gives each of 2 processes its own: leave it out"):
        make(place, tmp_path / "run", device="cuda")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


RESUMED = [("dflash", "adamw"), ("dflash", "muon"), ("eagle3", "adamw"), ("eagle3", "muon")]


@pytest.mark.parametrize(("kind", "optimizer"), RESUMED)
def test_optimisers_resume_in_process(kind, optimizer, place, tmp_path):
    changes = {"drafter": kind, "max_steps": 8, "optimizer": optimizer, "checkpoint_every": 4}
    whole = make(place, tmp_path / "whole", **changes)
    whole.train()
    half = make(place, tmp_path / "half", **changes)
    half._enter()
    steps(half, 4)
    half._save()
    again = make(place, tmp_path / "half", **changes)
    again.train()
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(again)[name]), name


def test_backends_agree(place, tmp_path, monkeypatch):
    """T3: a plain softmax = SDPA = FlexAttention = blocks apart, forward and gradients, packed and windowed."""
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "_validate_device", lambda *args: None)  # its own reference path has gradients on a CPU too
    for window in (None, 6):
        found = {}
        trainer = make(place, tmp_path / str(window), window=window)
        batch = trainer.run.batches.batch(trainer.run.batches.step(0), 0)
        for name in ("sdpa", "flex", "blocked", "eager"):
            blocks = Blocks(trainer.run.network, "sdpa" if name == "eager" else name)
            with monkeypatch.context() as patched:
                if name == "eager":
                    patched.setattr(injection, "attend", by_hand)
                loss, _ = trainer.learner.loss(blocks, batch, trainer.learner.features, 0)
                found[name] = (loss.detach(), *torch.autograd.grad(loss, list(blocks.parameters())))
        for name in ("flex", "blocked", "eager"):
            for ours, theirs in zip(found[name], found["sdpa"], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)


def by_hand(query, keys, values, mask, scale):
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return ((query @ keys.transpose(-1, -2) * scale + mask).softmax(-1) @ values).transpose(1, 2)


# ---- what comes out


def test_the_result_is_a_drafter_that_others_load(place, tmp_path, capsys):
    config = recipe(place / "target", place / "corpus", tmp_path / "run", max_steps=20, evaluate_every=10, shortlist=12)
    arguments = [f"{key}={json.dumps(value)}" for key, value in vars(config).items()]
    assert main(["train", *arguments]) == 0
    printed = capsys.readouterr()
    assert "drafter" in printed.out
    assert "in real decoding" in printed.err
    folder = tmp_path / "run" / "drafter"
    target = load_target(place / "target", dtype="float32")
    drafter = load_drafter(folder, target)
    assert drafter.config.taps == (0, 1, 3)
    assert drafter.config.mask_token_id == 5
    assert drafter.shortlist is not None
    assert len(drafter.shortlist.ids) == 12
    card = (folder / "README.md").read_text()
    for word in ("acceptance length", "first slot", "answer tokens", "licence", "learning_rate: 0.003"):
        assert word in card
    from dflash.model import DFlashDraftModel

    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in drafter.network.state_dict().items():
        if name in theirs.state_dict():
            torch.testing.assert_close(theirs.state_dict()[name].float(), tensor.float())
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "real_tau" in entry] == [10, 20]
    assert all(0 <= share <= 1 for entry in entries if "accuracy" in entry for share in entry["accuracy"])
    assert main(["plot", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_text_trains_with_the_targets_own_labels(place, tmp_path):
    """A corpus of text beside one of answers: its blocks are marked, its loss is that of the target's choices."""
    texts = tmp_path / "t.txt"
    texts.write_text("words that the target never wrote " * 40)
    arguments = ["--target", str(place / "target"), "--dtype", "float32", "--text", str(texts)]
    assert main(["data", str(tmp_path / "text"), *arguments]) == 0
    config = recipe(place / "target", place / "corpus", tmp_path / "run", max_steps=90, learning_rate=1e-2, sequence_length=600)
    both = [str(place / "corpus"), str(tmp_path / "text")]
    trainer = Trainer(dataclasses.replace(config, corpus=both, held_out=1))
    assert trainer.run.documents.tokens["text"] > 400
    batch = trainer.run.batches.batch(range(len(trainer.run.batches.packed)), 0)
    for row, members in enumerate(batch.members):
        for a in range(batch.anchors.shape[1]):
            if batch.real[row, a]:
                document = trainer.run.documents.train[members[batch.documents[row, batch.anchors[row, a]]]]
                assert bool(batch.foreign[row, a]) == (document.source == "text")
    losses = steps(trainer, 90)
    assert losses[-1] < 0.6 * losses[0]


def test_text_is_no_prompt_to_decode(place, tmp_path, monkeypatch):
    """Acceptance length is that of answers: rows of text are not asked, and are held out only where nothing else is."""
    (tmp_path / "t.txt").write_text("words that the target never wrote " * 400)
    arguments = ["--target", str(place / "target"), "--dtype", "float32", "--text", str(tmp_path / "t.txt"), "--context", "64"]
    assert main(["data", str(tmp_path / "text"), *arguments, "--max-new-tokens", "8"]) == 0
    asked = []
    right = module.decode_held_out
    monkeypatch.setattr(
        module, "decode_held_out", lambda t, d, documents, *rest: asked.append(documents) or right(t, d, documents, *rest)
    )
    config = recipe(
        place / "target", place / "corpus", tmp_path / "run", max_steps=2, evaluate_every=1, held_out=6, evaluate_prompts=6
    )
    Trainer(dataclasses.replace(config, corpus=[str(place / "corpus"), str(tmp_path / "text")])).train()
    assert all(len(documents) == 6 and not any(d.foreign for d in documents) for documents in asked)
    asked.clear()
    alone = dataclasses.replace(config, corpus=[str(tmp_path / "text")], out=str(tmp_path / "alone"))
    assert (Trainer(alone).train() / "model.safetensors").exists()
    assert asked == [[], []]
    looks = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [look["real_tau"] for look in looks if "real_tau" in look] == [None, None]


def test_a_run_can_ask_for_a_thinking_mode(place, tmp_path):
    target = load_target(place / "target", dtype="float32")
    make_corpus(tmp_path / "on", target, 6, thinking=True)
    with pytest.raises(UsageError, match="was made with thinking on, the recipe asks for off"):
        Trainer(recipe(place / "target", tmp_path / "on", tmp_path / "run", thinking=False))
    both = recipe(place / "target", tmp_path / "on", tmp_path / "run")
    both = dataclasses.replace(both, corpus=[str(tmp_path / "on"), str(place / "corpus")])
    with pytest.raises(UsageError, match="was made with thinking as its template has it, another with on"):
        Trainer(both)
    folder = Trainer(recipe(place / "target", tmp_path / "on", tmp_path / "run", thinking=True, max_steps=1)).train()
    assert json.loads((folder / "target.json").read_text())["thinking"] is True


def test_warm_start_goes_on_from_a_drafter(place, tmp_path):
    first = make(place, tmp_path / "first", max_steps=30, learning_rate=1e-2)
    folder = first.train()
    second = make(place, tmp_path / "second", init=str(folder), max_steps=5, mask_token_id=None, taps=[])
    for name, tensor in weights(second).items():
        torch.testing.assert_close(tensor, load_file(folder / "model.safetensors")[name].float())
    assert steps(second, 1)[0] < 0.9 * steps(make(place, tmp_path / "third"), 1)[0]
    for key, value in (("layers", 3), ("heads", 8), ("window", 4), ("intermediate_size", 40)):
        with pytest.raises(UsageError, match=rf"{key} is {value}, but the drafter in .* has"):
            make(place, tmp_path / "fourth", init=str(folder), **{key: value})
    shorter = make(place, tmp_path / "fifth", init=str(folder), block_size=4, max_steps=5)
    drafted = load_drafter(shorter.train(), shorter.target)
    assert drafted.block_size == 4, "no weight depends on it"


CONSTANT = {"schedule": "wsd", "warmup": 2, "checkpoint_every": 100, "feature_noise": 0.1, "dropout": 0.1}


def test_a_constant_rate_falls_in_the_last_steps():
    def shares(steps, **changes):
        config = dataclasses.replace(TrainConfig(schedule="wsd", warmup=2), **changes)
        return [rate_share(step, steps, config) for step in range(steps)]

    assert shares(6) == [0.5, 1, 1, 1, 1, 1]
    falling = shares(10, decay=0.4, floor=0.1)
    assert falling[:6] == [0.5, 1, 1, 1, 1, 1] and falling[-1] == pytest.approx(0.1)
    assert falling[6:] == pytest.approx([0.1 + 0.9 * (1 - math.sqrt(i / 4)) for i in (1, 2, 3, 4)])
    assert shares(20, warmup=0.1) == shares(20)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_branch_equals_a_plain_decay_to_the_bit(optimizer, place, tmp_path):
    """A run at a constant rate, left at step 6 and decayed in a folder of its own: what one run with that decay would have been."""
    changes = {**CONSTANT, "optimizer": optimizer}
    whole = make(place, tmp_path / "whole", max_steps=10, decay=0.4, floor=0.1, **changes)
    whole.train()
    trunk = make(place, tmp_path / "trunk", max_steps=6, **changes)
    trunk.train()
    branch = make(place, tmp_path / "branch", branch=str(tmp_path / "trunk"), max_steps=10, decay=0.4, floor=0.1, **changes)
    branch.train()
    assert all(torch.equal(tensor, weights(branch)[name]) for name, tensor in weights(whole).items())
    assert any(not torch.equal(tensor, weights(trunk)[name]) for name, tensor in weights(whole).items())
    first = json.loads((tmp_path / "branch" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] > 6
    again = make(place, tmp_path / "branch", branch=str(tmp_path / "trunk"), max_steps=10, decay=0.4, floor=0.1, **changes)
    again.train()  # its own checkpoint goes before the trunk's
    assert again.step == 10


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"branch": "nowhere"}, "has no checkpoint"),
        ({"max_steps": 6}, "give more max_steps"),
        ({"learning_rate": 1e-4}, "holds a run with learning_rate 0.003 instead of 0.0001; take another out or branch"),
        ({"seed": 3}, "holds a run with seed 0 instead of 3"),
    ],
)
def test_a_branch_of_something_else_is_refused(changes, told, place, tmp_path):
    make(place, tmp_path / "trunk", max_steps=6, **CONSTANT).train()
    given = {"max_steps": 10, "decay": 0.4, "branch": str(tmp_path / "trunk"), **CONSTANT, **changes}
    with pytest.raises(UsageError, match=told):
        make(place, tmp_path / "branch", **given).train()
    assert not (tmp_path / "branch" / "checkpoints").exists()


def test_layers_of_the_target_are_a_start(place, tmp_path):
    trainer = make(place, tmp_path / "run", init="target")
    ours = trainer.run.network.layers[1].mlp.gate_proj.weight
    torch.testing.assert_close(ours.detach(), trainer.target.layers[-1].mlp.gate_proj.weight)
    with pytest.raises(UsageError, match=r"init is target, but its layers have \[48, 32\] for mlp.gate_proj.weight \[40, 32\]"):
        make(place, tmp_path / "other", init="target", intermediate_size=40)


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_norms_of_another_kind_are_not_copied(family):
    """Gemma's norm weighs by 1 + w: shapes fit, and the scale would be wrong."""
    layer = tiny.model(family).model.layers[-1]
    torch.nn.init.normal_(layer.input_layernorm.weight, 1.0, 0.3)
    assert plain_norm(layer.input_layernorm) == (family == "llama")


def test_the_best_drafter_is_there_before_the_end(place, tmp_path):
    trainer = make(place, tmp_path / "run", max_steps=20, evaluate_every=5)
    trainer._enter()
    for _ in range(5):
        trainer.learner.step(trainer.step)
        trainer.step += 1
    trainer._look_and_keep()
    assert load_drafter(tmp_path / "run" / "drafter", trainer.target).block_size == 8
    assert "Step 5 of 20, the best by acceptance length" in (tmp_path / "run" / "drafter" / "README.md").read_text()


def test_early_stopping_and_kept_checkpoints(place, tmp_path):
    trainer = make(
        place, tmp_path / "run", max_steps=40, learning_rate=0.0, evaluate_every=5, checkpoint_every=5, patience=2, keep=1
    )
    trainer.train()
    assert trainer.step == 15  # nothing is learnt at rate 0: the first evaluation stays the best, two more are waited for
    assert trainer.best[0] == 5
    assert trainer.checkpoints.steps() == [5, 15]


# ---- bad input, in one sentence, before anything is written


BAD = {
    "unknown key": (["learningrate=3"], "unknown config key 'learningrate'; did you mean learning_rate?"),
    "type": (["layers=two"], "layers is 'two'; it must be a whole number"),
    "range": (["dropout=1.5"], "dropout is 1.5; it must be at least 0 and at most 0.9"),
    "choice": (["optimizer=sgd"], "optimizer is 'sgd'; use adamw, muon"),
    "no loss": (["ce_weight=0"], "there is no loss"),
    "two rules": (["gamma=4", "dpace=0.5"], "leave one of them out"),
    "mask is end": (["mask_token_id=2"], "mask_token_id is 2, a pad, end or other special token"),
    "mask outside": (["mask_token_id=9999"], "mask_token_id is 9999; the target's embedding has rows 0 to"),
    "block": (["block_size=99"], "block_size is 99, but the longest answer of the corpus has 24 tokens"),
    "taps": (["taps=[0,4]"], "layers 0 to 3 that can be tapped"),
    "held out": (["held_out=20"], "held_out is 20, but the corpus has only 20 conversations"),
    "no corpus": (["corpus=[]"], "no corpus"),
    "not a corpus": (["corpus=nowhere"], "nowhere is not a corpus"),
    "flex on a cpu": (["attention=flex"], "attention is flex, which has no gradients on a CPU"),
    "no drafter": (["init=nowhere"], "init is 'nowhere'; it must be scratch, target, or a drafter folder"),
    "muon's rate": (["muon_learning_rate=0.1"], "muon_learning_rate has no effect with optimizer adamw"),
    "tracker": (["trackers=[foo]"], "tracker 'foo' is unknown"),
    "tracker's package": (["trackers=[wandb]"], "tracker 'wandb' is not installed"),
    "heads": (["heads=4", "kv_heads=3"], "must be a multiple"),
    "pairs": (["head_dim=15"], "head_dim is 15; it must be even"),
    "words of a DFlash": (["words=100"], "words has no effect with drafter dflash"),
    "layers of an EAGLE-3": (["drafter=eagle3"], "layers has no effect with drafter eagle3"),
}


def test_a_tracker_is_told_what_the_metrics_say(place, tmp_path, monkeypatch):
    """With accelerate's own trackers replaced by one that keeps what it is told: settings once, every figure, and the end."""
    told, settings, ended = {}, [], []

    class Kept(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "tensorboard", False, None

        def __init__(self, run_name, **kwargs):
            super().__init__()

        def store_init_configuration(self, values):
            settings.append(values)

        def log(self, values, step=None, **kwargs):
            told.setdefault(step, {}).update(values)

        def finish(self):
            ended.append(True)

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Kept)
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TENSORBOARD])
    make(place, tmp_path / "run", max_steps=6, log_every=3, evaluate_every=6, trackers=["tensorboard"]).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 6] and sorted(told) == [3, 6]
    assert all(told[line["step"]]["loss"] == line["loss"] for line in lines if "loss" in line)
    assert "real_tau" in told[6] and len(settings) == len(ended) == 1 and settings[0]["max_steps"] == "6"


@pytest.mark.parametrize(("overrides", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input(overrides, sentence, place, tmp_path, capsys):
    config = recipe(place / "target", place / "corpus", tmp_path / "run")
    arguments = [f"{key}={json.dumps(value)}" for key, value in vars(config).items()]
    assert main(["train", *arguments, *overrides]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_corpus_of_another_target_is_refused(place, tmp_path):
    """Name, weights, tokenizer, template: what differs is named."""
    tiny.save_folder(tmp_path / "target", seed=1)
    make_corpus(tmp_path / "corpus", load_target(tmp_path / "target", dtype="float32"), 6)
    with pytest.raises(UsageError, match="is not of target .*: target, weights_sha256 differ"):
        Trainer(recipe(place / "target", tmp_path / "corpus", tmp_path / "run"))
    target = load_target(place / "target", dtype="float32")
    target.tokenizer.chat_template += " "
    make_corpus(tmp_path / "templated", target, 2)
    with pytest.raises(UsageError, match="template_sha256 differs"):
        Trainer(recipe(place / "target", tmp_path / "templated", tmp_path / "run"))


def test_a_corpus_serves_every_dtype(place, tmp_path):
    """Who a target is does not depend on the dtype it was loaded in."""
    assert identity(load_target(place / "target", dtype="float32")) == identity(load_target(place / "target", dtype="bfloat16"))


def test_texts_with_one_beginning_are_not_one_text(place, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text("the same licence stands at the head of every file " * 2 + f"{number} " * 40)
    assert (
        main(["data", str(tmp_path / "text"), "--target", str(place / "target"), "--dtype", "float32", "--text", str(folder)]) == 0
    )
    trainer = Trainer(recipe(place / "target", tmp_path / "text", tmp_path / "run", held_out=1, sequence_length=600, block_size=4))
    assert (len(trainer.run.documents.train), trainer.run.documents.dropped) == (4, 0)


def test_a_damaged_shard_is_refused(place, tmp_path):
    make_corpus(tmp_path / "corpus", load_target(place / "target", dtype="float32"), 6)
    shard = tmp_path / "corpus" / "answers-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"answers-00000.safetensors is damaged"):
        Trainer(recipe(place / "target", tmp_path / "corpus", tmp_path / "run"))


def test_a_run_folder_of_another_recipe_or_corpus_is_refused(place, tmp_path):
    make(place, tmp_path / "run", max_steps=2).train()
    manifest = tmp_path / "run" / "config.yaml"  # of a run from before a field existed
    manifest.write_text("".join(line for line in manifest.read_text().splitlines(True) if not line.startswith("revealed")))
    make(place, tmp_path / "run", max_steps=2).train()
    with pytest.raises(UsageError, match=r"holds a run with learning_rate 0.003 instead of 0.001"):
        make(place, tmp_path / "run", max_steps=2, learning_rate=1e-3).train()
    make(place, tmp_path / "run", max_steps=2, log_every=1).train()  # what is only shown may change
    make_corpus(tmp_path / "corpus", load_target(place / "target", dtype="float32"), 8)
    manifest = tmp_path / "run" / "config.yaml"
    manifest.write_text(manifest.read_text().replace(str(place / "corpus"), str(tmp_path / "corpus")))
    with pytest.raises(UsageError, match="the corpus has changed since"):
        Trainer(recipe(place / "target", tmp_path / "corpus", tmp_path / "run", max_steps=2)).train()


def test_numbers_that_are_not_finite_stop_the_run(place, tmp_path, monkeypatch):
    trainer = make(place, tmp_path / "run", max_steps=6, checkpoint_every=2)
    right = trainer.learner.loss

    def loss(*args):
        total, sums = right(*args)
        return total * (float("nan") if trainer.step == 3 else 1.0), sums

    monkeypatch.setattr(trainer.learner, "loss", loss)
    with pytest.raises(
        BlockdraftError, match=r"step 3: the loss or its gradient is not .* conversations k\d.*checkpoint is step 2"
    ):
        trainer.train()
    assert trainer.checkpoints.steps() == [2]


def test_a_full_disk_is_refused_before_the_first_step(place, tmp_path, monkeypatch):
    from collections import namedtuple

    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(10, 9, 1))
    with pytest.raises(UsageError, match="checkpoints take .* GB free; use another out"):
        make(place, tmp_path / "run", max_steps=2).train()
    assert not (tmp_path / "run").exists()


def test_features_that_do_not_fit_are_refused_before_the_first_step(place, tmp_path, monkeypatch):
    from collections import namedtuple

    monkeypatch.setattr(module, "available_memory", lambda: 1e4)
    with pytest.raises(UsageError, match="features take .* of memory are free; use features=disk or online"):
        make(place, tmp_path / "run", max_steps=2, features="memory").train()
    trainer = make(place, tmp_path / "run", max_steps=2, features="disk")
    room = 12 * 4 * sum(p.numel() for p in trainer.run.network.parameters()) + 10
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(room, 0, room))
    with pytest.raises(UsageError, match="checkpoints and features take .* GB free; use another out"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_a_run_folder_has_one_run_at_a_time(place, tmp_path, monkeypatch):
    trainer = make(place, tmp_path / "run", max_steps=1)
    right = trainer._step

    def step():
        with pytest.raises(UsageError, match="another process trains in"):
            make(place, tmp_path / "run", max_steps=1).train()
        return right()

    monkeypatch.setattr(trainer, "_step", step)
    trainer.train()
    make(place, tmp_path / "run", max_steps=1).train()


def test_processes_share_the_features_on_disk(place, tmp_path):
    """What each of them computed stays known when both have stored, and a file that was cut is not believed."""
    one, other = (make(place, tmp_path / "run", features="disk").learner.features for _ in range(2))
    ours, theirs = one.of([0, 1]), other.of([2, 3])
    one.flush()
    other.flush()
    third = make(place, tmp_path / "run", features="disk").learner.features
    third._compute = None
    for found, wanted in zip(third.of([0, 1, 2, 3]), [*ours, *theirs], strict=True):
        assert torch.equal(found, wanted)
    file = tmp_path / "run" / "features" / "features.bin"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    with pytest.raises(UsageError, match=r"features\.bin has \d+ bytes instead of \d+; delete the folder"):
        make(place, tmp_path / "run", features="disk").learner.features  # noqa: B018


def test_a_document_has_the_same_features_in_any_company(place, tmp_path):
    """T1: a pass over documents of unlike lengths is padded on the right, where nothing sees it."""
    features = make(place, tmp_path / "run").learner.features
    lengths = [len(document.ids) for document in features.documents]
    indices = [lengths.index(min(lengths)), lengths.index(max(lengths))]
    assert min(lengths) < max(lengths)
    together = features._compute(indices)
    for index, found in zip(indices, together, strict=True):
        torch.testing.assert_close(found, features._compute([index])[0], atol=1e-5, rtol=1e-5)


def test_kept_features_of_something_else_are_refused(place, tmp_path):
    make(place, tmp_path / "run", features="disk").learner.features.flush()
    with pytest.raises(UsageError, match=r"holds features of another taps \(\[0, 1, 3\]\); delete the folder"):
        steps(make(place, tmp_path / "run", features="disk", taps=[0, 2, 3]), 1)


def test_a_plan_writes_nothing(place, tmp_path, capsys):
    config = recipe(place / "target", place / "corpus", tmp_path / "run", features="memory", dpace=0.5)
    arguments = [f"{key}={json.dumps(value)}" for key, value in vars(config).items()]
    assert main(["train", *arguments, "--plan"]) == 0
    printed = capsys.readouterr().out
    for word in ("16 conversations, 384 answer tokens", "4 held out", "parameters", "blocks", "GFLOP", "memory", "D-PACE 0.5"):
        assert word in printed
    assert not (tmp_path / "run").exists()


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    for key in vars(recipe("t", "c", "o")):
        assert f"  {key}: " in printed
