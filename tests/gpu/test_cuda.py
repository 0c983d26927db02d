"""On CUDA: decoding is lossless, FlexAttention trains what the other kernels train, and a run from data to drafter works."""

import dataclasses

import pytest
import torch

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.load import load_drafter, load_target
from blockdraft.rules.budget import Budget
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.training.blocks import Blocks
from blockdraft.training.trainer import Trainer
from tests import tiny
from tests.doubles import random_drafter
from tests.recipes import make_corpus, recipe


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mistral", "gpt_oss"])
def test_lossless(family):
    """fp32 greedy on CUDA: with a drafter that is mostly wrong, what plain decoding says."""
    target = Target(tiny.model(family).cuda())
    drafter = random_drafter(target)
    drafter = type(drafter)(drafter.network.cuda(), target.embed, target.head)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    outputs = []
    for used in (None, drafter, TreeDrafter(drafter, Budget(None, 8, 24))):
        requests = [Request(tiny.prompt(length, length), params, target) for length in (3, 9, 14)]
        for _ in decode(target, used, requests, batch_size=2):
            pass
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]
    recorded = family in ("llama", "qwen3")  # the others' layers have windows
    assert (target.kernels == "graphs") == recorded and drafter.recorder.on


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_passes_are_the_ordinary_ones(dtype):
    """Graphs against kernels launched one by one: logits of verified trees, drafts, and features taken in."""
    target = Target(tiny.model("llama").to("cuda", getattr(torch, dtype)))
    network = random_drafter(target).network.to("cuda", getattr(torch, dtype))
    found = []
    for on in (True, False):
        drafter = DFlashDrafter(network, target.embed, target.head)
        target.recorder.on = drafter.recorder.on = on
        cache, said = target.new_cache(3, 100), []
        drafter.reset(3, 100)
        for row, length in enumerate((3, 9, 40)):
            for _, features in target.prefill(cache, row, tiny.prompt(length, row), drafter.taps):
                drafter.observe(row, torch.zeros(1, length).cuda(), features, [length])
        for step in range(4):
            anchors = torch.tensor([1, 2, 3], device="cuda") + step
            said.append(drafter.logits(anchors, [6, 4, 6])[[0, 2]])
            parents = torch.tensor([[0, 0, 1, 2, 3]] * 3, device="cuda")
            proposal = Proposal(torch.arange(15, device="cuda").view(3, 5), [6, 6, 6], parents)
            logits, features = target.verify(cache, anchors, proposal, drafter.taps)
            said.append(logits)
            target.commit(cache, [[0, 2, 4], [0], [0, 1]])
            drafter.observe(0, torch.zeros(3, 3).cuda(), features[:, :3], [3, 1, 2])
            said.append(target.step(cache, anchors)[:, None])
            drafter.observe(0, torch.zeros(3, 1).cuda(), features[:, :1], [1, 1, 1])
        assert bool(cache.recordings) == on and bool(drafter.cache.recordings) == on
        found.append(said)
    for ours, plain in zip(*found, strict=True):
        tolerance = 1e-4 if dtype == "float32" else 0.05
        torch.testing.assert_close(ours, plain, atol=tolerance * float(plain.std()), rtol=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    tiny.save_folder(folder / "target")
    make_corpus(folder / "corpus", load_target(folder / "target", dtype="float32", device="cuda"))
    return folder


@pytest.mark.parametrize("window", [None, 6])
def test_flex_attention_trains_what_the_others_train(window, place, tmp_path):
    """Compiled FlexAttention against SDPA and blocks apart, forward and gradients, packed rows."""
    config = recipe(place / "target", place / "corpus", tmp_path / "run", device="cuda", window=window, head_dim=16)
    trainer = Trainer(config)
    batch = trainer.run.batches.batch(trainer.run.batches.step(0), 0).to(trainer.device)
    found = {}
    for name in ("sdpa", "flex", "blocked"):
        blocks = Blocks(trainer.run.network, name)
        loss, _ = trainer.learner.loss(blocks, batch, trainer.learner.features, 0)
        found[name] = (loss.detach(), *torch.autograd.grad(loss, list(blocks.parameters())))
    for name in ("flex", "blocked"):
        for ours, theirs in zip(found[name], found["sdpa"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3 * float(theirs.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"compile": True}], ids=str)
def test_a_run_on_cuda(changes, place, tmp_path):
    config = recipe(
        place / "target", place / "corpus", tmp_path / "run", device="cuda", head_dim=16, max_steps=150, learning_rate=1e-2
    )
    trainer = Trainer(dataclasses.replace(config, evaluate_every=150, **changes))
    folder = trainer.train()
    assert load_drafter(folder, load_target(place / "target", dtype="float32", device="cuda")).config.taps == (0, 1, 3)
