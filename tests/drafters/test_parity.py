"""Parity with the reference, the official ``dflash`` package: draft logits, tokens and rounds of whole generations."""

import json

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate
from safetensors.torch import save_file
from transformers import Qwen3Config

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.load import load_drafter
from blockdraft.rules.sampling import SamplingParams
from tests import tiny

LAYERS = 3


def drafter_config(target, **changes):
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
        "num_target_layers": 5,
        "num_hidden_layers": LAYERS,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": tiny.VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "layer_types": ["full_attention"] * LAYERS,
        **changes,
    }


def save_pair(folder, target, **changes):
    """A random drafter folder, and the reference's model with the same weights."""
    raw = drafter_config(target, **changes)
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(3)
    second = "DFlash2DraftModel" in raw["architectures"]
    kind = DFlash2DraftModel if second else DFlashDraftModel
    official = kind(Qwen3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")}))
    with torch.no_grad():
        for parameter in official.parameters():
            parameter.normal_(0, 0.25) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    tensors = {k.replace("codebook.weight", "codebook"): v.contiguous() for k, v in official.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return official.eval()


SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
VARIANTS = {
    "A": {},
    "B": {
        "block_size": None,
        "rope_theta": None,
        "dflash_config": {"block_size": 6, "mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "sliding": {**SLIDING, "use_sliding_window": True},
    "sliding-bidirectional": {**SLIDING, "use_sliding_window": True, "is_causal": False},
    "all-causal": {"is_causal": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    "scales": {
        "dflash_config": {
            "mask_token_id": 3,
            "target_layer_ids": [0, 2, 3],
            "input_embedding_scale": 2.5,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        }
    },
    "dflash 2": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * LAYERS,
        "use_sliding_window": True,
        "sliding_window": 7,
        "dflash_config": {
            "mask_token_id": 3,
            "target_layer_ids": [0, 2, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 12,
            "selector_top_k": 4,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 5.0,
        },
    },
    "default-taps": {"dflash_config": {"mask_token_id": 3}, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_whole_generation(variant, family, tmp_path):
    target, plain = tiny.target(family), tiny.model(family)
    changes = {key: value for key, value in VARIANTS[variant].items() if value is not None}
    official = save_pair(tmp_path, target, **changes)
    if variant == "B":  # the nested schema has neither key on top
        raw = json.loads((tmp_path / "config.json").read_text())
        del raw["block_size"], raw["rope_theta"]
        (tmp_path / "config.json").write_text(json.dumps(raw))
    drafter = load_drafter(tmp_path, target)
    assert drafter.block_size == 6
    for length, count in ((9, 29), (3, 12), (14, 1)):
        prompt = tiny.prompt(length, length)
        theirs, lengths, draft_logits = run_official(official, plain, prompt, count)
        request = Request(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True), target)
        ours = capture_logits(drafter)
        list(decode(target, drafter, [request]))
        assert request.output == theirs
        assert request.rounds == lengths
        assert len(ours) == len(draft_logits)
        for mine, reference in zip(ours, draft_logits, strict=True):
            torch.testing.assert_close(mine, reference, atol=5e-4 if variant == "dflash 2" else 1e-4, rtol=1e-4)


def run_official(official, plain, prompt, count):
    """The reference's output, its number of rounds, and the draft logits of each round."""
    captured = []
    own = official.compute_logits

    def compute_logits(hidden, head):
        captured.append(own(hidden, head))
        return captured[-1]

    official.compute_logits = compute_logits
    rounds = 0

    def count_rounds(*args, **kwargs):
        nonlocal rounds
        rounds += 1

    handle = plain.register_forward_hook(count_rounds)
    try:
        output = dflash_generate(official, plain, torch.tensor([prompt]), max_new_tokens=count, stop_token_ids=None)
    finally:
        handle.remove()
        del official.compute_logits
    return output[0, len(prompt) :].tolist(), rounds - 1, captured


def capture_logits(drafter):
    captured = []
    own = type(drafter)._logits

    def logits(hidden):
        result = own(drafter, hidden)
        captured.append(result.clone())
        return result

    drafter._logits = logits
    return captured


def test_scaled_embeddings_are_borrowed_raw(tmp_path):
    """T16: Gemma multiplies embeddings inside its module; the reference reads the raw row, and so do we."""
    target, plain = tiny.target("gemma2"), tiny.model("gemma2")
    official = save_pair(tmp_path, target)
    drafter = load_drafter(tmp_path, target)
    ids = torch.tensor([[5, 9]])
    torch.testing.assert_close(target.embed(ids), plain.get_input_embeddings().weight[ids], atol=0, rtol=0)
    assert not torch.allclose(target.embed(ids), plain.get_input_embeddings()(ids))
    prompt = tiny.prompt(8, 1)
    theirs, rounds, draft_logits = run_official(official, plain, prompt, 20)
    request, ours = Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), target), capture_logits(drafter)
    list(decode(target, drafter, [request]))
    assert (request.output, request.rounds) == (theirs, rounds)
    torch.testing.assert_close(ours[0], draft_logits[0], atol=1e-4, rtol=1e-4)
