"""Target: parts are found, taps are the tapped layers' outputs, unsupported models are refused with the reason."""

import inspect

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.engine.packing import PackedLinear, can_pack
from blockdraft.errors import UsageError
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from tests import tiny
from tests.doubles import Bushy, knowing, random_drafter


class Renamed(LlamaPreTrainedModel, GenerationMixin):
    """A Llama whose modules all have names that no library knows."""

    def __init__(self, config):
        super().__init__(config)
        self.woerter = nn.Embedding(config.vocab_size + 9, config.hidden_size)
        self.stapel = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.drehung = LlamaRotaryEmbedding(config)
        self.schluss = LlamaRMSNorm(config.hidden_size)
        self.kopf = nn.Linear(config.hidden_size, config.vocab_size + 5, bias=True)  # padded rows, and a bias
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **kwargs):
        cache = cache if cache is not None else kwargs.pop("past_key_values", None)
        x = self.woerter(input_ids)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + x.shape[1])[None]
        key = "cache" if "cache" in inspect.signature(LlamaDecoderLayer.forward).parameters else "past_key_values"
        mask = create_causal_mask(self.config, x, attention_mask, position_ids=position_ids, **{key: cache})
        rope = self.drehung(x, position_ids=position_ids)
        for layer in self.stapel:
            x = layer(x, attention_mask=mask, position_embeddings=rope, position_ids=position_ids, **{key: cache})
        return CausalLMOutputWithPast(logits=self.kopf(self.schluss(x)), past_key_values=cache)


def renamed():
    torch.manual_seed(5)
    return Renamed(LlamaConfig(**{**tiny.COMMON, "tie_word_embeddings": False})).eval()


def hand_greedy(model, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_renamed_modules_are_found_and_lossless():
    target, plain = Target(renamed(), name="renamed"), renamed()
    assert target.embedding is target.model.woerter
    assert target.head is target.model.kopf
    assert target.final_norm is target.model.schluss
    assert target.layers == list(target.model.stapel)
    assert target.vocab_size == tiny.VOCABULARY + 5
    prompt = tiny.prompt(9, 2)
    expected = hand_greedy(plain, prompt, 20)
    right = knowing({tuple(prompt): expected}, vocabulary=10**6)
    for drafter in (random_drafter(target), right, Bushy(right.guess), None):
        request = Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), target)
        list(decode(target, drafter, [request]))
        assert request.output == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parts_of_every_family(family):
    target = tiny.target(family)
    assert target.embedding is target.model.get_input_embeddings()
    assert target.head is target.model.get_output_embeddings()
    assert len(target.layers) == 5
    assert target.final_norm is not None


def test_taps_are_the_outputs_of_the_layers(llama, reference):
    """Id i is the output of layer i: transformers' hidden_states[i + 1]."""
    ids = tiny.prompt(9, 1)
    states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    cache = llama.new_cache(1, 16)
    for _, features in llama.prefill(cache, 0, ids, (0, 1, 3)):
        expected = torch.cat([states[i + 1] for i in (0, 1, 3)], dim=-1)
        torch.testing.assert_close(features, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def test_nothing_is_tapped_without_a_drafter(llama, monkeypatch):
    hooked = []
    monkeypatch.setattr(nn.Module, "register_forward_hook", lambda self, hook: hooked.append(self))
    list(decode(llama, None, [Request(tiny.prompt(5), SamplingParams(max_new_tokens=6), llama)]))
    assert hooked == []


def test_only_tapped_layers_are_hooked_and_hooks_go(llama):
    with llama._tapped((1, 3)) as outputs:
        assert [bool(layer._forward_hooks) for layer in llama.layers] == [False, True, False, True, False]
        llama.model(torch.tensor([tiny.prompt(4)]))
    assert sorted(outputs) == [1, 3]
    assert not any(layer._forward_hooks for layer in llama.layers)


def test_the_model_stays_a_plain_transformers_model(llama, reference):
    """Between our passes its own attention is in force: generate and save work as before."""
    prompt = tiny.prompt(6, 3)
    list(decode(llama, None, [Request(prompt, SamplingParams(max_new_tokens=4), llama)]))
    assert llama.model.config._attn_implementation == reference.config._attn_implementation
    assert tiny.greedy(llama.model, prompt, 12) == tiny.greedy(reference, prompt, 12)
    assert llama.model.state_dict().keys() == reference.state_dict().keys()


def test_linear_layers_are_packed_where_they_can_be_and_gradients_still_flow():
    target = tiny.target()
    packed = [m for m in target.model.modules() if isinstance(m, PackedLinear)]
    can = can_pack(torch.float32, torch.device("cpu"))
    assert len(packed) == (5 * 7 + 1 if can else 0)
    assert target.packed_bytes == sum(m.weight.numel() * 4 for m in packed)
    assert not can_pack(torch.float16, torch.device("cpu"))
    loss = target.model(torch.tensor([tiny.prompt(4)])).logits.sum()
    loss.backward()
    assert target.model.lm_head.weight.grad is not None


def test_a_module_that_cannot_read_slices_runs_unpacked(monkeypatch):
    """Packing is an optimisation: where it breaks a model, the model runs without it, and that is said."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    def flat(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.view(-1)) * up.view(-1)).view(gate.shape))

    monkeypatch.setattr(LlamaMLP, "forward", flat)
    with pytest.warns(UserWarning, match="linear layers run unpacked"):
        target = tiny.target("llama")
    assert target.packed_bytes == 0
    assert not any(isinstance(m, PackedLinear) for m in target.model.modules())
    assert hand_greedy(target.model, tiny.prompt(4), 3) == hand_greedy(tiny.model("llama"), tiny.prompt(4), 3)


REFUSED = {
    "encoder-decoder": (
        lambda: transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50), "encoder-decoder"
    ),
    "recurrent": (lambda: transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50), "recurrent state"),
    "hybrid": (
        lambda: transformers.Lfm2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
            layer_types=["conv", "full_attention"], intermediate_size=32,
        ),
        "conv layers",
    ),
    "own attention": (
        lambda: transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50),
        "computes attention by itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_rolled_back_are_refused(kind):
    make, reason = REFUSED[kind]
    config = make()
    automatic = transformers.AutoModelForSeq2SeqLM if kind == "encoder-decoder" else AutoModelForCausalLM
    with pytest.raises(UsageError, match=reason):
        Target(automatic.from_config(config))


def test_a_model_whose_cached_pass_differs_is_refused(monkeypatch):
    """The probe at load compares a branching cache with a plain pass: a wrong mask cannot go unnoticed."""
    import blockdraft.targets.target as module

    monkeypatch.setattr(module.Proposal, "visible", lambda self: None)  # siblings see each other
    with pytest.raises(UsageError, match="differ from a plain forward pass"):
        tiny.target("llama")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cache_is_float32_on_a_cpu(dtype):
    target = tiny.target("llama", dtype=dtype)
    cache = target.new_cache(2, 16)
    list(target.prefill(cache, 1, tiny.prompt(5)))
    assert {buffer.dtype for buffer in cache.keys.values()} == {torch.float32}
    assert cache.bytes() == 2 * 5 * 2 * 2 * 16 * 8 * 4


def test_long_prompts_are_run_in_chunks(monkeypatch, llama, reference):
    monkeypatch.setattr("blockdraft.targets.target.PREFILL_CHUNK", 7)
    prompt = tiny.prompt(40, 8)
    drafter = random_drafter(llama)
    before = llama.forwards
    request = Request(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True), llama)
    list(decode(llama, drafter, [request]))
    assert llama.forwards - before == 6 + request.rounds
    assert request.output == tiny.greedy(reference, prompt, 9)


def test_longrope_is_refused():
    """Its frequencies depend on the longest row of a pass: rows of a batch, and blocks, would change each other."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    with pytest.raises(UsageError, match="longrope"):
        tiny.target("phi3", rope_parameters={**rope, "original_max_position_embeddings": 16})


def test_weights_that_are_not_numbers_are_called_damaged():
    model = tiny.model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(UsageError, match="not finite"):
        Target(model)


def test_layers_of_another_width_decode_but_take_no_drafter(tmp_path):
    """OPT with a projected embedding: plain decoding is exact, a DFlash drafter cannot borrow its embedding."""
    from blockdraft.drafters.pairing import check_pair

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=67, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=5, num_attention_heads=4,
        max_position_embeddings=128, init_std=0.3,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config).eval(), name="opt")
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    prompt = tiny.prompt(6)
    request = Request(prompt, SamplingParams(max_new_tokens=10, ignore_eos=True), target)
    list(decode(target, None, [request]))
    assert request.output == tiny.greedy(plain, prompt, 10)
    assert not target.tappable
    with pytest.raises(UsageError, match="features of one hidden state per token"):
        check_pair(random_drafter(tiny.target("llama")).network, target, "d")


@pytest.mark.filterwarnings("ignore:tiny-doge")
def test_layers_that_cannot_run_over_the_cache_are_refused(monkeypatch):
    """Doge builds its mask inside the layer, from shapes: one sentence instead of a crash."""
    monkeypatch.setitem(tiny.FAMILIES, "doge", ("DogeConfig", {}))
    with pytest.raises(UsageError, match="cannot run over a branching cache"):
        tiny.target("doge")


def test_layers_of_four_dimensions_take_no_drafter(monkeypatch):
    """Gemma 3n's layers put out several streams per token: exact without taps, refused with them."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "head_dim": 8, "sliding_window": 7}
    own = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    sizes = {"activation_sparsity_pattern": [0.0] * 5, "intermediate_size": [48] * 5}
    monkeypatch.setitem(tiny.FAMILIES, "gemma3n", ("Gemma3nTextConfig", {**layers, **own, **sizes}))
    assert not tiny.target("gemma3n").tappable
