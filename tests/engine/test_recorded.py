"""Recorded passes say what ordinary ones say. Without a GPU a trace of the operations stands for a graph: it repeats them on the
same tensors, and what Python computed while it was made is fixed, as in a graph."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.model import ModelDrafter
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.engine import recorded
from blockdraft.engine.kernels import use_kernels
from blockdraft.errors import UsageError
from blockdraft.rules.budget import Budget
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from tests import tiny
from tests.doubles import random_drafter

LENGTHS = (3, 9, 14, 5)


def traced(run):
    outputs = run()
    graph = make_fx(run, pre_dispatch=False)()

    def replay():
        for mine, again in zip(outputs, graph(), strict=True):
            mine.copy_(again)
        return outputs

    return replay


@pytest.fixture
def recording(monkeypatch):
    """Switch recording on for models on this CPU; counts what is recorded."""
    made = []
    monkeypatch.setattr(recorded, "capture", lambda run: made.append(run) or traced(run))
    use_kernels(False)
    yield made
    use_kernels(True)


def on(model):
    model.recorder.on = True
    return model


def decoded(target, drafter, lengths=LENGTHS, rows=3, tokens=24, **params):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **params)
    requests = [Request(tiny.prompt(length, length), params, target) for length in lengths]
    for _ in decode(target, drafter, requests, batch_size=rows):
        pass
    return [request.output for request in requests]


# The drafter's passes do not depend on the target's family, and the target's are those of plain decoding.
@pytest.mark.parametrize(
    ("method", "family"), [("ar", "llama"), ("ar", "qwen3"), ("chain", "qwen3"), ("tree", "qwen3"), ("model", "llama")]
)
def test_output_is_that_of_ordinary_passes(method, family, recording):
    """Ragged rows that end at different times, and whose contexts outgrow a shape."""
    target = on(Target(tiny.model(family)))
    assert target.kernels == "graphs"
    drafter = None
    if method == "model":
        drafter = ModelDrafter(on(Target(tiny.model(family))), target.vocab_size)
    elif method != "ar":
        drafter = on(random_drafter(target))
        drafter = drafter if method == "chain" else TreeDrafter(drafter, Budget(None, 8, 24))
    for _ in range(2):
        for prompt, output in zip(LENGTHS, decoded(target, drafter), strict=True):
            assert output == tiny.greedy(tiny.model(family), tiny.prompt(prompt, prompt), 24)
    assert len(recording) > 1 and target.recorder.on


def test_a_drafter_drafts_the_same(recording):
    """Proposals by recorded passes are those by ordinary ones: features taken in, blocks, widths of rows apart, windows."""
    target = Target(tiny.model("llama"))
    network = random_drafter(target).network
    for windows in (network.config.windows, (None, 5, *network.config.windows[2:])):
        network.config = dataclasses.replace(network.config, windows=windows)
        plain, ours = (type(random_drafter(target))(network, target.embed, target.head) for _ in range(2))
        on(ours)
        generator = torch.Generator().manual_seed(1)
        for drafter in (plain, ours):
            drafter.reset(3, 200)
        for counts in ([4, 1, 2], [40, 3, 33], [1, 1, 1], [9, 2, 5]):
            features = torch.randn(3, max(counts), len(ours.taps) * target.hidden_size, generator=generator)
            for drafter in (plain, ours):
                drafter.observe(0, torch.zeros(3, max(counts), dtype=torch.long), features, counts)
            for widths in ([6, 6, 6], [5, 1, 3], [2, 2, 2]):
                anchors = torch.randint(0, target.vocab_size, (3,), generator=generator)
                expected, found = plain.logits(anchors, widths), ours.logits(anchors, widths)
                inside = torch.arange(1, max(widths)) < torch.tensor(widths)[:, None]
                torch.testing.assert_close(found[inside], expected[inside], atol=1e-4, rtol=1e-4)
    assert len(recording) > 4


def test_a_shape_is_recorded_once(recording):
    """A handful of shapes, kept from one decoding to the next of as many rows."""
    target = on(Target(tiny.model("llama")))
    drafter = on(random_drafter(target))
    decoded(target, drafter)
    before = len(recording)
    decoded(target, drafter)
    assert len(recording) == before
    decoded(target, None, rows=1, tokens=4)
    assert len(recording) == before + 1


def test_what_cannot_be_recorded_is_said(monkeypatch, recording):
    def refuse(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recorded, "capture", refuse)
    target = on(Target(tiny.model("llama"), name="tiny"))
    with pytest.warns(
        UserWarning, match=r"passes of tiny cannot be recorded.* slower .operation not permitted when .* capturing\)$"
    ):
        [output] = decoded(target, None, lengths=(5,))
    assert output == tiny.greedy(tiny.model("llama"), tiny.prompt(5, 5), 24) and target.kernels == "none"
    target = on(Target(tiny.model("llama"), name="tiny"))
    target.recorder.required = True
    with pytest.raises(UsageError, match="--compile on: passes of tiny cannot be recorded"):
        decoded(target, None)


def test_a_model_that_counts_by_itself_is_found_out(recording):
    """One that reads the cache's length as a number would be wrong in every later pass: the first comparison shows it."""
    model = tiny.model("llama")
    inner, forward = model.model.rotary_emb, model.model.rotary_emb.forward

    def by_length(x, position_ids):
        kv = by_length.cache
        return forward(x, kv.get_seq_length() + torch.zeros_like(position_ids) + (position_ids - position_ids[:, :1]))

    target = Target(model, name="counting")
    monkey = target.new_cache

    def new_cache(rows, capacity):
        by_length.cache = monkey(rows, capacity)
        return by_length.cache

    target.new_cache = new_cache
    inner.forward = by_length
    try:
        with pytest.warns(UserWarning, match="standard deviations from ordinary ones"):
            [output] = decoded(on(target), None, lengths=(12,), rows=1)
    finally:
        inner.forward = forward
    assert output == tiny.greedy(model, tiny.prompt(12, 12), 24)


def test_windows_are_not_recorded(recording):
    assert not Target(tiny.model("mistral")).recorder.on
