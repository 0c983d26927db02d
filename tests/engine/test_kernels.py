"""The C kernel: equal to a plain softmax, refused where it does not apply, and not needed."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.decoding.decode import Decoder, decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.tree import TreeDrafter
from blockdraft.engine import attention, kernels, packing
from blockdraft.engine.attention import attend
from blockdraft.engine.packing import pack_linears
from blockdraft.errors import UsageError
from blockdraft.formats import zlab
from blockdraft.load import load_drafter
from blockdraft.rules.budget import Budget
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.verification import own_reference
from tests import tiny
from tests.doubles import random_drafter


def plain(query, keys, values, lengths, scale):
    scores = query @ keys.transpose(-1, -2) * scale
    seen = torch.arange(keys.shape[2]) < lengths[:, None, None, None]
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 5, 16, 64, 80, 128, 256]), st.integers(0, 2**31)
)
@settings(max_examples=40, deadline=None)
def test_kernel_equals_a_plain_softmax(rows, heads, group, size, seed):
    """Whatever the shapes and lengths, also on a view of larger buffers, with scores far apart."""
    torch.manual_seed(seed)
    keys, values = (torch.randn(rows + 1, heads, 150, size)[:rows, :, :140] for _ in range(2))
    query = torch.randn(rows, heads, group, size) * 4
    lengths = torch.randint(1, 141, (rows,), dtype=torch.int32)
    found = kernels.attend_rows(query, keys, values, lengths, size**-0.5)
    if found is None:
        pytest.skip("no C compiler")
    torch.testing.assert_close(
        found, plain(query.double(), keys.double(), values.double(), lengths, size**-0.5).float(), rtol=1e-4, atol=2e-5
    )


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([5, 64, 128]),
    st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_masked_queries_equal_a_plain_softmax(rows, heads, group, count, size, seed):
    """A tree's mask: any pattern in which every query sees something, one for all rows or each its own."""
    torch.manual_seed(seed)
    length = 100
    keys, values = (torch.randn(rows, heads, length, size) for _ in range(2))
    query = torch.randn(rows, heads * group, count, size) * 3
    seen = torch.rand(rows if seed % 2 else 1, 1, count, length) < 0.3
    seen[..., 70] = True
    seen[..., :65] &= seed % 3 > 0  # whole blocks of keys unseen
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    found = attend(query, keys, values, mask, size**-0.5)
    wide_keys, wide_values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = query.double() @ wide_keys.transpose(-1, -2) * size**-0.5 + mask
    expected = (scores.softmax(-1) @ wide_values).transpose(1, 2).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@given(st.integers(1, 130), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_linear_rows(rows, inputs, outputs, biased, narrow, seed):
    """Any shape, weights of either kind; and a row's result is to the bit what it is alone."""
    if kernels.library() is None:
        pytest.skip("no C compiler")
    torch.manual_seed(seed)
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    weight = weight.bfloat16() if narrow else weight
    bias = torch.randn(outputs) if biased else None
    layer = kernels.LinearRows(weight, bias)
    found = layer(x[None])[0]
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(layer(x[row : row + 1])[0], found[row])


@pytest.fixture
def unbuilt():
    """As if this process had not asked for the kernels yet; afterwards too."""
    kernels._built.cache_clear()
    yield
    kernels._built.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [(None, "there is no C compiler"), ("echo 'no -march' >&2; exit 1", "no -march"), ("exit 0", "No such file")],
)
def test_without_kernels_torch_computes_the_same_and_it_is_said_once(unbuilt, compiler, said, monkeypatch, tmp_path):
    """No compiler, one that fails, and one that writes nothing."""
    before = tiny.target()
    if compiler is not None:
        (tmp_path / "gcc").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "store"))
    kernels._built.cache_clear()
    with pytest.warns(UserWarning, match=said) as warned:
        target = tiny.target()
    assert len(warned) == 1 and target.kernels == "none" and said in kernels.why_none()
    prompt = [5, 9, 20, 31]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert own_reference(target, prompt, params) == own_reference(before, prompt, params)
    assert not list((tmp_path / "store").rglob("*.so"))


PLAIN = {"llama", "llama-tied", "qwen2", "qwen3"}
compiled = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@compiled
@pytest.mark.parametrize("family", sorted({*PLAIN, "qwen2-sliding", "gemma2", "phi", "granite", "gpt_neox", "smollm3", "mixtral"}))
def test_layers_run_as_one_call_where_that_is_the_same(family):
    """Windows, scaled residuals, partial or absent rotary turns, experts, norms of another kind: the model's own forward."""
    assert (tiny.target(family)._plain is not None) == (family in PLAIN)


@compiled
def test_bfloat16_weights_and_float32_arithmetic(monkeypatch):
    """On a processor without AMX: what the rounded weights say in float32, to rounding; verification to the bit."""
    monkeypatch.setattr(packing, "cpu_has_amx", lambda: False)
    target = tiny.target(dtype=torch.bfloat16)
    exact = tiny.model(dtype=torch.bfloat16).float()
    assert target._plain is not None
    ids = tiny.prompt(30, 3)
    cache = target.new_cache(1, 60)
    last, _ = next(iter(target.prefill(cache, 0, ids[:20])))
    expected = exact(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(last, expected[19], atol=2e-4, rtol=1e-3)
    verified, _ = target.verify(cache, torch.tensor(ids[20:21]), Proposal(torch.tensor([ids[21:28]]), [8]))
    torch.testing.assert_close(verified[0], expected[20:28], atol=2e-4, rtol=1e-3)
    stepped = torch.cat([target.step(cache, torch.tensor([token])) for token in ids[20:28]])
    assert torch.equal(stepped, verified[0]), "a row does not depend on the rows beside it"


@compiled
def test_exact_is_identical_in_bfloat16(trained, monkeypatch):
    """Also where oneDNN would multiply bfloat16; chains, trees, batches, sampled or not. Refused where it cannot be."""
    monkeypatch.setattr(packing, "cpu_has_amx", lambda: True)
    target = Target(tiny.model(dtype=torch.bfloat16), exact=True)
    prompts = [tiny.prompt(length, seed) for seed, length in enumerate((6, 1, 11))]
    chain = DFlashDrafter(trained.network, target.embed, target.head)
    for how in ({}, {"temperature": 0.9, "seed": 5}):
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **how)
        outputs = []
        for drafter, batch_size in ((None, 1), (None, 3), (chain, 1), (TreeDrafter(chain, Budget(None, 8, 24)), 3)):
            requests = [Request(prompt, params, target, row) for row, prompt in enumerate(prompts)]
            list(decode(target, drafter, requests, batch_size))
            outputs.append([request.output for request in requests])
        assert all(found == outputs[0] for found in outputs)
    with pytest.raises(UsageError, match="cannot be verified to the bit here"):
        Target(tiny.model("gemma2"), exact=True)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "count"), [(3, 20), (60, 20), (85, 20), (20, 130)])
def test_a_tree_is_verified_to_the_bit(dtype, length, count, monkeypatch):
    """Every node's logits are those of plain steps along its path, wherever its keys lie in the cache, however many there are; in
    a batch too."""
    monkeypatch.setattr(packing, "cpu_has_amx", lambda: False)
    target = tiny.target(dtype=dtype)
    generator = torch.Generator().manual_seed(length)
    parents = torch.tensor([[int(torch.randint(0, i + 1, (), generator=generator)) for i in range(count)] for _ in range(2)])
    tokens = torch.randint(3, 60, (2, count), generator=generator)
    cache, prompts = target.new_cache(2, 200), [tiny.prompt(length, 1), tiny.prompt(length + 7, 2)]
    target.prefill_rows(cache, 0, prompts)
    verified, _ = target.verify(cache, torch.tensor([5, 6]), Proposal(tokens, [count + 1, count + 1], parents))
    for row in range(2):
        for node in (4, count):
            path, at = [], node
            while at:
                path.insert(0, int(tokens[row, at - 1]))
                at = int(parents[row, at - 1])
            alone = target.new_cache(1, 200)
            target.prefill_rows(alone, 0, [prompts[row]])
            for token in [[5, 6][row], *path]:
                logits = target.step(alone, torch.tensor([token]))
            assert torch.equal(logits[0], verified[row, node])


LOOKALIKES = {
    "an MLP without a gate": ("ArceeConfig", {"head_dim": 8}),
    "partial rotary turns": ("GlmConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "queries that grow with their position": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "sliding_window": None,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "norms of unlike epsilons": ("LlamaConfig", {}),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}),
    "a bias on the output": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
}


@compiled
@pytest.mark.parametrize("kind", LOOKALIKES)
def test_layers_that_only_look_plain(kind):
    """Same modules in the same order, other arithmetic or other sizes: no crash, and the output is the model's own."""
    name, differing = LOOKALIKES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**tiny.COMMON, **differing})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if kind == "norms of unlike epsilons":
        model.model.layers[2].input_layernorm.variance_epsilon = 0.5
    prompt = tiny.prompt(100, 1)
    expected = tiny.greedy(model, prompt, 30)
    target = Target(model)
    assert (target.kernels == "layers") == (kind == "a bias on the output")
    request = Request(prompt, SamplingParams(max_new_tokens=30, stop_token_ids=()), target)
    list(decode(target, random_drafter(target), [request]))
    assert request.output == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_call_equals_the_models_own_forward(family):
    """Ragged rows, a tree, tapped layers, the keys and values left behind: to rounding."""
    target, slow = tiny.target(family), tiny.target(family)
    slow._plain = None
    found = []
    for one in (target, slow):
        cache = one.new_cache(3, 60)
        prompts = [tiny.prompt(length, length) for length in (9, 2, 17)]
        logits, features = one.prefill_rows(cache, 0, prompts, (0, 2, 3))
        found.append([logits, *(features[row, : len(prompt)] for row, prompt in enumerate(prompts))])
        tree = Proposal(torch.arange(15).view(3, 5) + 3, [6, 4, 6], torch.tensor([[0, 1, 1, 0, 4]] * 3))
        for part in one.verify(cache, torch.tensor([5, 6, 7]), tree, (1, 4)):
            found[-1].append(part[[0, 2]])
            found[-1].append(part[1, :4])  # the rest of this row is padding
        one.commit(cache, [[0, 1, 3], [0], [0, 4, 5]])
        found[-1].append(one.step(cache, torch.tensor([8, 9, 10])))
        keys, values = cache.buffers(2, 2, target.config.head_dim)
        for row, length in enumerate(cache.lengths):
            found[-1] += [keys[row, :, :length], values[row, :, :length]]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


def test_without_a_compiler_torch_computes_the_same(monkeypatch):
    prompt, params = tiny.prompt(9, 0), SamplingParams(max_new_tokens=16, ignore_eos=True)
    expected = tiny.greedy(tiny.model(), prompt, 16)
    for module in (kernels, attention, packing):
        monkeypatch.setattr(module, "library", lambda: None)
    target = tiny.target()
    assert target._plain is None
    for drafter in (None, random_drafter(target)):
        request = Request(prompt, params, target)
        list(decode(target, drafter, [request]))
        assert request.output == expected


@compiled
def test_layers_that_do_not_see_alike_keep_their_own_forward(llama, tmp_path):
    """Unlike windows need a mask each; layers of one kind run as one call, windows and causal ones included."""
    for changes, one_call in (
        ({}, True),
        ({"windows": (5, 5)}, True),
        ({"causal": (True, True)}, True),
        ({"windows": (5, None)}, False),
    ):
        zlab_folder = tmp_path / str(len(list(tmp_path.iterdir())))
        zlab_folder.mkdir()
        if changes.get("windows") == (5, None):
            network = random_drafter(llama, **changes).network
            packed = pack_linears(network.linears(), torch.float32, torch.device("cpu"))
            drafter = DFlashDrafter(network, llama.embed, llama.head, packed_bytes=packed)
        else:
            zlab.write(random_drafter(llama, **changes).network, zlab_folder, torch.float32)
            drafter = load_drafter(zlab_folder, llama)
        assert (drafter._plain is not None) == one_call
        plain = random_drafter(llama, **changes)
        for each in (drafter, plain):
            each.reset(2, 64)
            for row, length in enumerate((12, 7)):
                torch.manual_seed(row)
                ids = torch.tensor([tiny.prompt(length, row)])
                each.observe(row, ids, torch.randn(1, length, 96), [length])
        anchors = torch.tensor([5, 6])
        for widths in ([8, 8], [8, 3]):
            ours, theirs = drafter.logits(anchors, widths), plain.logits(anchors, widths)
            torch.testing.assert_close(ours[0], theirs[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours[1, : widths[1] - 1], theirs[1, : widths[1] - 1], atol=1e-4, rtol=1e-4)


def test_extreme_scores_are_no_nan():
    keys, query = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 1, 8)
    keys[0, 0, 2] = 1e4
    keys[0, 0, 3] = -1e4
    values = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous()
    found = attend(query, keys, values, torch.tensor([4], dtype=torch.int32), 1.0)
    assert found.flatten().tolist() == [2.0] * 8


def test_other_shapes_are_left_to_sdpa(monkeypatch):
    keys, lengths = torch.randn(2, 2, 9, 16), torch.tensor([3, 9], dtype=torch.int32)
    query = torch.randn(2, 4, 1, 16)
    wide = torch.randn(2, 2, 9, 300)
    assert kernels.attend_rows(torch.randn(2, 2, 3, 300), wide, wide, lengths, 1.0) is None  # too wide heads
    assert (
        kernels.attend_rows(query.view(2, 2, 2, 16), keys, keys.transpose(1, 2).contiguous().transpose(1, 2), lengths, 1.0) is None
    )
    ours = attend(query, keys, keys, lengths, 1.0)
    monkeypatch.setattr(kernels, "library", lambda: None)
    torch.testing.assert_close(attend(query, keys, keys, lengths, 1.0), ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2-sliding", "granite"])
def test_prompts_in_one_pass_equal_prompts_alone(family, drafted):
    """Ragged prompts together, then ragged steps: every row says what it says alone, in as many rounds; windows, soft caps and
    sinks included."""
    target = tiny.target(family)
    prompts = [tiny.prompt(length, length) for length in (3, 11, 1, 7)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    together, alone = ([Request(prompt, params, target) for prompt in prompts] for _ in range(2))
    drafter = random_drafter(target) if drafted else None
    decoder = Decoder(target, drafter, 4, 40)
    decoder.admit(together[0])
    decoder.admit_all(together[1:])
    while decoder.active:
        decoder.round()
    for request in alone:
        single = Decoder(target, drafter, 1, 40)
        single.admit(request)
        while single.active:
            single.round()
    assert [(r.output, r.rounds, r.accepted_at) for r in together] == [(r.output, r.rounds, r.accepted_at) for r in alone]
