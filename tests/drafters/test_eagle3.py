"""EAGLE-3: drafts are those of a computation by hand, whatever the cache holds; and output is the target's own."""

import dataclasses
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.cli.main import main
from blockdraft.drafters.eagle3 import DEPTH, TOP_K
from blockdraft.errors import UsageError
from blockdraft.formats import eagle3
from blockdraft.generation import generate
from blockdraft.load import digest_of, load_drafter, load_target
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import COUNT, EAGLE3_TAPS, random_eagle3, run
from tests.recipes import sequence_features


@pytest.fixture(scope="module")
def sequence(llama):
    ids = tiny.prompt(40, 4)
    return torch.tensor(ids), sequence_features(llama, ids, EAGLE3_TAPS)


def by_hand(network, embedded, fused):
    """Outputs ``[tokens, hidden]``: the formulas of the paper on one whole sequence, without a cache."""
    layer, a = network.midlayer, network.midlayer.self_attn
    count, size = len(fused), a.head_dim

    def norm(x, module):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight

    z = torch.cat([norm(embedded, layer.input_layernorm), norm(fused, layer.hidden_norm)], dim=-1)
    angles = torch.arange(count)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)

    def turned(x):
        low, high = x.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    query, key = (turned((z @ p.weight.T).view(count, -1, size)) for p in (a.q_proj, a.k_proj))
    value = (z @ a.v_proj.weight.T).view(count, -1, size)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), float("-inf"))
    x = fused + torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1) @ a.o_proj.weight.T
    inner, m = norm(x, layer.post_attention_layernorm), layer.mlp
    return x + (torch.nn.functional.silu(inner @ m.gate_proj.weight.T) * (inner @ m.up_proj.weight.T)) @ m.down_proj.weight.T


def logs_behind(drafter, ids, features, anchor, path):
    """Log-probabilities over the drafter's words after ``ids[:anchor + 1]`` and a drafted path."""
    network = drafter.network
    fused = features[0, :anchor] @ network.fc.weight.T
    tokens = [*ids[1 : anchor + 1].tolist(), *path]
    for length in range(anchor, len(tokens) + 1):
        outputs = by_hand(network, drafter.embed(torch.tensor(tokens[:length])), fused[:length])
        fused = torch.cat([fused[:length], outputs[-1:]])
    weight, norm = network.lm_head.weight, network.norm
    last = outputs[-1]
    last = last * torch.rsqrt(last.pow(2).mean() + norm.eps) * norm.weight
    return (weight @ last).log_softmax(-1)


def observed(drafter, ids, features, anchors, step=3):
    """Several rows that have observed ``ids`` up to their anchors, in pieces, with drafts in between."""
    drafter.reset(len(anchors), 80)
    for row, anchor in enumerate(anchors):
        for start in range(0, anchor, step):
            stop = min(anchor, start + step)
            drafter.observe(row, ids[None, start:stop], features[:, start:stop], [stop - start])
            if row == 0:
                drafter.propose(ids[stop][None], [4], None)
    return drafter


@torch.no_grad()
def test_a_chain_is_that_of_a_computation_by_hand(llama, sequence):
    ids, features = sequence
    anchors = [17, 5, 30]
    drafter = observed(random_eagle3(llama), ids, features, anchors)
    proposal = drafter.propose(ids[anchors], [8, 8, 5], None)
    words = drafter.network.words()
    for row, anchor in enumerate(anchors):
        path = []
        for token in proposal.tokens[row, : proposal.widths[row] - 1].tolist():
            expected = words[logs_behind(drafter, ids, features, anchor, path).argmax()]
            assert token == int(expected)
            path.append(token)


@torch.no_grad()
@pytest.mark.parametrize("candidates", [1, 7, 60])
def test_a_tree_holds_the_best_of_what_was_expanded(candidates, llama, sequence):
    """Every level is grown from the ten best of the one before; scores by hand; parents stand before their children."""
    ids, features = sequence
    anchors = [9, 21]
    drafter = observed(random_eagle3(llama, candidates=candidates), ids, features, anchors)
    proposal = drafter.propose(ids[anchors], [4, 6], None)
    words = drafter.network.words().tolist()
    wide = min(TOP_K, candidates)
    for row, (anchor, width) in enumerate(zip(anchors, [4, 6], strict=True)):
        beams, grown = [((), 0.0)], []
        for _ in range(min(width - 1, DEPTH)):
            children = []
            for path, score in beams:
                logs = logs_behind(drafter, ids, features, anchor, list(path))
                values, places = logs.topk(wide)
                children += [((*path, words[p]), score + float(v)) for v, p in zip(values, places, strict=True)]
            grown += children
            beams = sorted(children, key=lambda child: -child[1])[:wide]
        best = sorted(grown, key=lambda child: -child[1])[:candidates]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True):
            if len(paths) == proposal.widths[row]:
                break
            assert parent < len(paths)
            paths.append((*paths[parent], token))
        assert set(paths[1:]) == {path for path, _ in best}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("candidates", [None, 20])
def test_output_is_the_targets_own(family, candidates):
    target, plain = tiny.target(family), tiny.model(family)
    prompts = [tiny.prompt(length, length) for length in (3, 12, 1, 30)]
    for batch_size in (1, 3):
        for request in run(target, random_eagle3(target, candidates=candidates), prompts, batch_size):
            assert request.output == tiny.greedy(plain, request.prompt, COUNT)


@pytest.mark.parametrize("candidates", [None, 20])
def test_seeded_sampling_is_that_of_plain_decoding(candidates, llama):
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
    prompts = [tiny.prompt(length, length) for length in (5, 9)]
    alone = run(llama, None, prompts, **how)
    for drafted, plain in zip(run(llama, random_eagle3(llama, candidates=candidates), prompts, 2, **how), alone, strict=True):
        assert drafted.output == plain.output


def test_drawn_drafts_follow_the_laws_that_are_reported(llama, sequence):
    """Under the rejection rule each token is drawn from its own law, given the ones drawn before it."""
    ids, features = sequence
    drafter = observed(random_eagle3(llama), ids, features, [9])
    calls = []

    def draw(logits):
        calls.append(logits.shape[1])
        laws = logits.float().softmax(-1)
        return laws.topk(2, dim=-1).indices[..., 1], laws

    proposal = drafter.propose(ids[[9]], [5], draw)
    assert calls == [1, 2, 3, 4]
    path = []
    for token, law in zip(proposal.tokens[0].tolist(), proposal.probabilities[0], strict=True):
        logs = logs_behind(drafter, ids, features, 9, path)
        torch.testing.assert_close(law[drafter.network.words()], logs.exp(), atol=1e-5, rtol=1e-4)
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-5)
        path.append(token)


def test_rows_can_be_reused(llama, sequence):
    """A row that is cut back, or moved, drafts as one that never held more."""
    ids, features = sequence
    drafter = observed(random_eagle3(llama), ids, features, [20, 12])
    drafter.truncate(0, 11)
    fresh = observed(random_eagle3(llama), ids, features, [11])
    assert torch.equal(drafter.propose(ids[[11, 12]], [6, 6], None).tokens[0], fresh.propose(ids[[11]], [6], None).tokens[0])
    drafter.move(1, 0)
    other = observed(random_eagle3(llama), ids, features, [12])
    assert torch.equal(drafter.propose(ids[[12]], [6], None).tokens, other.propose(ids[[12]], [6], None).tokens)


# ---- files


@pytest.fixture
def folder(llama, tmp_path):
    eagle3.write(random_eagle3(llama).network, tmp_path, len(llama.layers), torch.float32)
    return tmp_path


def test_a_folder_goes_round_to_the_bit(llama, folder, tmp_path):
    network = eagle3.read(folder, len(llama.layers))
    original = random_eagle3(llama).network
    assert network.config.taps == original.config.taps
    for name, tensor in original.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor)
    again = tmp_path / "again"
    again.mkdir()
    eagle3.write(network, again, len(llama.layers), torch.float32)
    assert (again / "config.json").read_text() == (folder / "config.json").read_text()
    first, second = (load_file(place / "model.safetensors") for place in (folder, again))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_taps_are_written_down_unless_they_are_the_usual_ones(folder):
    raw = json.loads((folder / "config.json").read_text())
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4], "outputs are inputs of the layers behind"
    del raw["eagle_config"]
    raw["architectures"] = ["LlamaForCausalLM"]  # as in SafeAILab's own
    (folder / "config.json").write_text(json.dumps(raw))
    network = eagle3.read(folder, 30)
    assert network.config.taps == (1, 14, 26)
    eagle3.write(network, folder, 30)
    assert "eagle_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda t, c: t["d2t"].add_(60), "d2t maps the drafter's words to ids from 60"),
        (lambda t, c: t["t2d"].fill_(True), "t2d and d2t disagree"),
        (lambda t, c: t.update(d2t=t["d2t"].bfloat16()), "d2t is stored as torch.bfloat16"),
        (lambda t, c: t.pop("norm.weight"), "missing: norm.weight"),
        (lambda t, c: t["fc.weight"].fill_(float("nan")), "not finite"),
        (lambda t, c: c.pop("draft_vocab_size"), "has no 'draft_vocab_size'"),
        (lambda t, c: c.update(num_hidden_layers=2), "has 2 layers; an EAGLE-3 drafter has one"),
        (lambda t, c: c.update(hidden_act="magic"), "does not describe an EAGLE-3 drafter"),
    ],
)
def test_bad_folders(break_it, said, llama, folder):
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    break_it(tensors, raw)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=said):
        eagle3.read(folder, len(llama.layers))


def test_older_folders_hold_pickled_tensors(llama, folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors | {"embed_tokens.weight": llama.embedding.weight.half()}, folder / "pytorch_model.bin")
    network = eagle3.read(folder, len(llama.layers), llama.embedding.weight)
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(UsageError, match="was made for another target: the embedding that it holds"):
        eagle3.read(folder, len(llama.layers), torch.randn_like(llama.embedding.weight))
    torch.save({"fc.weight": Path("somewhere")}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
        eagle3.read(folder, len(llama.layers))


def test_scaled_positions_are_written_for_old_and_new_readers(llama, folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text())
    assert raw["rope_scaling"] is None
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": scaled}))
    eagle3.write(eagle3.read(folder, len(llama.layers)), tmp_path, len(llama.layers), torch.float32)
    found = json.loads((tmp_path / "config.json").read_text())
    assert {key: found["rope_scaling"][key] for key in ("rope_type", "factor")} == {"rope_type": "linear", "factor": 4.0}
    del found["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert dict(eagle3.read(tmp_path, len(llama.layers)).config.backbone.rope_parameters)["factor"] == 4.0


# ---- as a user meets it


@pytest.fixture(scope="module")
def pair(tiny_folder, tmp_path_factory):
    """A model folder and an EAGLE-3 drafter folder for it."""
    target = load_target(tiny_folder, dtype="float32")
    place = tmp_path_factory.mktemp("eagle3")
    eagle3.write(random_eagle3(target, words=100).network, place, len(target.layers), torch.float32)
    return target, place


def test_it_is_loaded_by_what_it_is(pair):
    target, place = pair
    drafter = load_drafter(place, target)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    alone = generate(target, "ab", None, sampling)[0]
    for tree, method in (("auto", "eagle3"), ("off", "eagle3"), (20, "eagle3-tree")):
        [result] = generate(target, ["ab"], drafter, sampling, tree=tree)
        assert result.method == method
        assert result.token_ids == alone.token_ids
    drawn = SamplingParams(max_new_tokens=12, temperature=1.0, acceptance="rejection", seed=1)
    assert generate(target, "ab", drafter, drawn)[0].new_tokens
    for options, said in (({"tree": 20}, "chosen, not drawn"), ({"tree": 20, "block_size": 1}, "chosen, not drawn")):
        with pytest.raises(UsageError, match=said):
            generate(target, "ab", drafter, drawn, **options)
    for block_size in (1, 10):
        with pytest.raises(UsageError, match="it must be from 2 to 9"), warnings.catch_warnings(action="ignore"):
            generate(target, "ab", drafter, sampling, tree=20, block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "it has hidden size 64, the target 32"),
        ({"vocab_size": 9000}, "it has a vocabulary of 9000"),
        ({"taps": (1, 3, 5)}, r"it has tapped layers \[1, 3, 5\], the target layers 0 to 4"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes, said, pair, tmp_path):
    own, _ = pair
    sizes = {"vocab_size": own.embedding.num_embeddings, **changes}
    taps = sizes.pop("taps", EAGLE3_TAPS)
    network = random_eagle3(tiny.target("llama", **sizes)).network
    network.config = dataclasses.replace(network.config, taps=taps)
    eagle3.write(network, tmp_path, len(own.layers), torch.float32)
    with pytest.raises(UsageError, match=said):
        load_drafter(tmp_path, own)


@pytest.mark.parametrize("layers", [5, 30])
def test_a_drafter_that_says_whom_it_learnt_from_is_believed(layers, pair, tmp_path):
    """Weights of the same shape but another digest may be a quantisation: that is said, and it runs."""
    target, place = pair
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    who = {"name": "another", "layers": layers, "hidden_size": target.hidden_size, "weights_sha256": "0" * 64}
    (tmp_path / "target.json").write_text(json.dumps(who))
    digest_of(target)
    if layers != len(target.layers):
        with pytest.raises(UsageError, match=f"was made for another, {layers} layers of width 32; .* has 5 of 32"):
            load_drafter(tmp_path, target)
        return
    with pytest.warns(UserWarning, match="learnt from other weights"):
        load_drafter(tmp_path, target)
    (tmp_path / "target.json").write_text("[")
    with pytest.warns(UserWarning, match="is damaged: which target the drafter learnt from is unknown"):
        load_drafter(tmp_path, target)


def test_bench_measures_it(pair, tiny_folder, tmp_path, capsys):
    base = ["bench", "--target", str(tiny_folder), "--dtype", "float32", "--tasks", "own", "--limit", "1", "--max-new-tokens", "6"]
    out = tmp_path / "r.json"
    assert main([*base, "--methods", "ar,eagle3,eagle3:2,eagle3-tree:10", "--drafter", str(pair[1]), "--out", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert {r["method"] for r in results} == {"ar", "eagle3", "eagle3:2", "eagle3-tree:10"}
    assert all(len(r["acceptance_by_position"]) <= 2 for r in results if r["method"] == "eagle3:2")
    assert all(r["identical_to_ar"] == 1.0 for r in results)
    assert all((r["extra_bytes"] > 0) == (r["method"] != "ar") for r in results)
    capsys.readouterr()
    for methods, drafters, said in (
        ("ar,eagle3", [], "method eagle3 needs an EAGLE-3 drafter"),
        ("ar,lookup", [pair[1]], "has no effect with these methods; leave it out or add eagle3"),
        ("ar,eagle3", [pair[1], pair[1]], "names two eagle3 drafters"),
        ("ar,eagle3-tree:x", [pair[1]], "is unknown"),
        ("ar,eagle3:8", [pair[1]], "made to draft at most 7 tokens in a chain"),
    ):
        given = [word for place in drafters for word in ("--drafter", str(place))]
        assert main([*base, "--methods", methods, *given]) == 2
        assert said in capsys.readouterr().err
