"""speculators' layout: what is written is read again to the bit, what cannot be said is refused, other people's files are met."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import UsageError
from blockdraft.formats import speculators
from blockdraft.load import load_drafter
from tests import tiny
from tests.doubles import COUNT, random_drafter, random_eagle3, run


def rewrite(folder, changes=None, tensors=None):
    """Change the config (None deletes a key) and the tensors of a drafter folder."""
    raw = json.loads((folder / "config.json").read_text())
    for key, value in (changes or {}).items():
        if value is None:
            raw.pop(key)
        else:
            raw[key] = value
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is not None:
        found = {**load_file(folder / "model.safetensors"), **tensors}
        save_file({k: v for k, v in found.items() if v is not None}, folder / "model.safetensors")


DRAFTERS = {
    "dflash": lambda target: random_drafter(target),
    "sliding": lambda target: random_drafter(target, causal=(True, False), windows=(6, None)),
    "non-causal window": lambda target: random_drafter(target, windows=(6, 6)),
    "eagle3": lambda target: random_eagle3(target),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_round_trip(kind, llama, tmp_path):
    """Tensors to the bit and every meaning; and what is loaded drafts losslessly."""
    network = DRAFTERS[kind](llama).network
    speculators.write(network, tmp_path, llama, torch.float32)
    found = speculators.read(tmp_path, llama)
    assert found.words is None
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, found.network.state_dict()[name]), name
    for field, value in vars(network.config).items():
        ours = getattr(found.network.config, field)
        if field == "backbone":
            skipped = ("architectures", "dtype", "transformers_version", "layer_types", "use_sliding_window", "sliding_window")
            same = {k: v for k, v in value.to_dict().items() if k not in skipped}
            assert same == {k: v for k, v in ours.to_dict().items() if k in same}
        else:
            assert ours == value, field
    drafter = load_drafter(tmp_path, llama)
    plain = tiny.model("llama")
    for request in run(llama, drafter, [tiny.prompt(9, 1)]):
        assert request.output == tiny.greedy(plain, request.prompt, COUNT)


def test_keys_that_others_look_for(llama, tmp_path):
    network = random_drafter(llama).network
    speculators.write(network, tmp_path, llama)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert raw["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert raw["sliding_window_non_causal"] is True
    assert raw["sample_from_anchor"] is False
    assert speculators.unknown_keys(raw) == []
    assert speculators.unknown_keys({**raw, "colour": 1}) == ["colour"]


def test_defaults_of_the_layer_class_may_be_absent(llama, tmp_path):
    """``to_diff_dict`` leaves out what equals the class's default; hidden_act, rope and the rest are filled in."""
    speculators.write(random_drafter(llama).network, tmp_path, llama)
    before = speculators.read(tmp_path, llama).network.config
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert layer["rms_norm_eps"] == 1e-6
    few = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    rewrite(tmp_path, {"transformer_layer_config": {key: layer[key] for key in few}})
    after = speculators.read(tmp_path, llama).network.config
    assert (after.causal, after.windows, after.taps) == (before.causal, before.windows, before.taps)
    for key in ("hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias"):
        assert getattr(after.backbone, key) == getattr(before.backbone, key), key


def test_a_reduced_vocabulary_drafts_from_its_own_words(llama, tmp_path):
    """The head's own rows and ``d2t`` offsets: drafts are those of the whole head where its rows are the target's."""
    whole = random_drafter(llama)
    speculators.write(whole.network, tmp_path, llama, torch.float32)
    ids = torch.arange(0, 60, 2)
    rows = llama.head.weight.detach()[ids].clone()
    tensors = {"lm_head.weight": rows, "d2t": ids - torch.arange(30), "t2d": torch.arange(60) % 2 == 0}
    rewrite(tmp_path, {"draft_vocab_size": 30}, tensors)
    drafter = load_drafter(tmp_path, llama)
    prompt = torch.tensor(tiny.prompt(10, 3))
    features = torch.randn(1, 10, 3 * llama.hidden_size)
    for each in (drafter, whole):
        each.reset(1, 40)
        each.observe(0, prompt[None], features, [10])
    ours, theirs = (each.logits(torch.tensor([7]), [8]) for each in (drafter, whole))
    torch.testing.assert_close(ours, theirs[..., ids])
    tokens = drafter.propose(torch.tensor([7]), [8], None).tokens
    assert bool((tokens % 2 == 0).all())
    rewrite(tmp_path, None, {"d2t": ids - torch.arange(30) + 40})
    with pytest.raises(UsageError, match="d2t does not map 30 words to different ids from 0 to 66"):
        load_drafter(tmp_path, llama)
    rewrite(tmp_path, None, {"d2t": ids - torch.arange(30), "t2d": torch.arange(60) % 2 == 1})
    with pytest.raises(UsageError, match="t2d and d2t disagree"):
        load_drafter(tmp_path, llama)
    for name, wrong, sentence in (
        ("lm_head.weight", rows[:, :16].contiguous(), "lm_head.weight is not 30 x 32 finite numbers"),
        ("lm_head.weight", rows[:10].contiguous(), "lm_head.weight is not 30 x 32"),
        ("lm_head.weight", rows * float("nan"), "lm_head.weight is not 30 x 32"),
        ("d2t", torch.zeros(30), "d2t is not 30 whole numbers"),
    ):
        rewrite(tmp_path, None, {**tensors, name: wrong})
        with pytest.raises(UsageError, match=sentence):
            load_drafter(tmp_path, llama)
    rewrite(tmp_path, None, tensors)
    rewrite(tmp_path, None, {"lm_head.weight": None, "t2d": None})
    with pytest.raises(UsageError, match="vocabulary of 30 words, but no lm_head.weight and d2t"):
        load_drafter(tmp_path, llama)


def test_copies_of_the_targets_embedding_and_head_must_be_the_targets(llama, tmp_path):
    """Files before 0.9 hold both."""
    speculators.write(random_drafter(llama).network, tmp_path, llama, torch.float32)
    head, embedding = (x.detach().clone() for x in (llama.head.weight, llama.embedding.weight))
    rewrite(tmp_path, None, {"lm_head.weight": head, "embed_tokens.weight": embedding})
    assert load_drafter(tmp_path, llama).shortlist is None
    for name, what in (("lm_head.weight", "head"), ("embed_tokens.weight", "embedding")):
        good = load_file(tmp_path / "model.safetensors")[name]
        rewrite(tmp_path, None, {name: good + 1})
        with pytest.raises(UsageError, match=f"brings its own {what}, and it is not that of"):
            load_drafter(tmp_path, llama)
        rewrite(tmp_path, None, {name: good})


REFUSED = {
    "sample_from_anchor": (random_drafter, {"sample_from_anchor": True}, "says sample_from_anchor"),
    "another kind": (random_drafter, {"speculators_model_type": "mtp"}, "holds a speculators 'mtp' drafter"),
    "width": (random_drafter, {"target_hidden_size": 64}, "a drafter of width 32 for a target of width 64"),
    "mask": (random_drafter, {"mask_token_id": None}, "has no 'mask_token_id'"),
    "causality": (random_drafter, {"transformer_layer_config": {"model_type": "qwen3", "is_causal": True}}, "says is_causal"),
    "taps": (random_drafter, {"aux_hidden_state_layer_ids": [2, 3, 9]}, "tapped layers"),
    "norm": (random_eagle3, {"norm_before_residual": True}, "says norm_before_residual"),
    "layers": (random_eagle3, {"transformer_layer_config": {"model_type": "qwen3"}}, "layers of a qwen3"),
}


@pytest.mark.parametrize(("make", "changes", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_known_here_is_refused(make, changes, sentence, llama, tmp_path):
    speculators.write(make(llama).network, tmp_path, llama)
    rewrite(tmp_path, changes)
    with pytest.raises(UsageError, match=sentence):
        load_drafter(tmp_path, llama)


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_scale": 2.0},
        {"softcap": 30.0},
        {"causal": (True, True)},
        {"causal": (True, False), "windows": (6, 6)},
        {"windows": (6, 4)},
    ],
    ids=str,
)
def test_what_the_layout_cannot_say_is_not_written(changes, llama, tmp_path):
    with pytest.raises(UsageError, match="speculators' layout"):
        speculators.write(random_drafter(llama, **changes).network, tmp_path, llama)
    assert not list(tmp_path.iterdir())
