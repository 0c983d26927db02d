"""Conversion: every round trip to the bit, whatever cannot be is refused by its reason, and nothing is half-written."""

import json
import shutil
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.cli.main import main
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.formats import assistant, eagle3, gguf, torchspec, zlab
from blockdraft.formats import convert as module
from blockdraft.formats.convert import convert
from blockdraft.formats.dialect import recognise
from blockdraft.formats.tokenizer import LETTERS, REST, _rule
from blockdraft.load import load_drafter, load_target
from tests import tiny
from tests.doubles import COUNT, random_drafter, random_eagle3, run
from tests.formats.test_speculators import rewrite


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target with a tokenizer, from a folder."""
    folder = tmp_path_factory.mktemp("target")
    tiny.save_folder(folder)
    return load_target(folder, dtype="float32")


def source(target, place, **changes):
    """A folder with a random drafter in z-lab's layout, float32."""
    place.mkdir(parents=True, exist_ok=True)
    zlab.write(random_drafter(target, **changes).network, place, torch.float32)
    return place


def same(one, other):
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


KINDS = {
    "plain": {},
    "windows": {"windows": (6, 6)},
    "bfloat16": {},
    "dflash 2": {"convolution": (2, 8), "selector": (12, 4), "windows": (6, 6)},
}


CASES = [(kind, layout) for kind in KINDS for layout in ("zlab", "speculators", "gguf", "transformers")]


@pytest.mark.parametrize(("kind", "layout"), [case for case in CASES if case != ("dflash 2", "transformers")])
def test_there_and_back(kind, layout, target, tmp_path):
    """A -> layout -> A: tensors and config equal to the bit, in both dtypes."""
    network = random_drafter(target, **KINDS[kind]).network
    (tmp_path / "a").mkdir()
    zlab.write(network, tmp_path / "a", torch.bfloat16 if kind == "bfloat16" else torch.float32)
    between = tmp_path / ("b.gguf" if layout == "gguf" else "b")
    proofs = convert(tmp_path / "a", between, layout, target)
    assert proofs[0] == f"{len(network.state_dict())} tensors equal to the bit"
    convert(between, tmp_path / "c", "zlab", target)
    assert same(tmp_path / "a", tmp_path / "c")
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ac")
    skipped = "attention_dropout initializer_range use_cache bos_token_id eos_token_id pad_token_id max_window_layers".split()
    assert {k: v for k, v in ours.items() if k not in skipped} == {k: v for k, v in theirs.items() if k not in skipped}
    drafter = load_drafter(between, target)
    assert drafter.taps == (0, 1, 3)


MIXED = [
    {"causal": (True, False), "windows": (6, None)},  # as in Qwen3.6-27B: sliding layers are causal
    {"causal": (False, False), "windows": (6, None)},
    {"causal": (True, True), "windows": (None, 6)},
]


@pytest.mark.parametrize("changes", MIXED, ids=str)
def test_layers_of_unlike_windows(changes, target, tmp_path):
    """z-lab's layout says windows by layer; causality for all, or that of the sliding ones."""
    (tmp_path / "a").mkdir()
    zlab.write(random_drafter(target, **changes).network, tmp_path / "a", torch.float32)
    found = zlab.read(tmp_path / "a").config
    assert (found.causal, found.windows) == (changes["causal"], changes["windows"])
    convert(tmp_path / "a", tmp_path / "b", "zlab", target)
    assert same(tmp_path / "a", tmp_path / "b")
    for changes in ({"causal": (True, False), "windows": (6, 6)}, {"windows": (6, 4)}):
        with pytest.raises(UsageError, match="z-lab's layout has one window size"):
            zlab.write(random_drafter(target, **changes).network, tmp_path / "a", torch.float32)


def test_yarn_is_written_in_both_spellings(target, tmp_path):
    network = random_drafter(target).network
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    network.config.backbone.rope_parameters = rope
    zlab.write(network, tmp_path, torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_parameters"] == rope
    assert (raw["rope_theta"], {**raw["rope_scaling"], "rope_theta": 5000.0}) == (5000.0, rope)
    assert dict(zlab.read(tmp_path).config.backbone.rope_parameters) == rope


def test_a_loaded_conversion_decodes_losslessly(target, tmp_path):
    plain = tiny.model("llama")
    folder = source(tiny.target("llama"), tmp_path / "a")
    for layout in ("speculators", "transformers"):
        convert(folder, tmp_path / layout, layout, tiny.target("llama"))
        for request in run(tiny.target("llama"), load_drafter(tmp_path / layout, tiny.target("llama")), [tiny.prompt(9, 1)]):
            assert request.output == tiny.greedy(plain, request.prompt, COUNT)


def test_eagle3_between_its_two_layouts(target, tmp_path):
    (tmp_path / "a").mkdir()
    eagle3.write(random_eagle3(target).network, tmp_path / "a", len(target.layers), torch.float32)
    convert(tmp_path / "a", tmp_path / "b", "speculators", target)
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "b" / "model.safetensors")
    convert(tmp_path / "b", tmp_path / "c", "safeailab", target)
    assert same(tmp_path / "a", tmp_path / "c")
    for layout in ("zlab", "gguf", "transformers"):
        with pytest.raises(UsageError, match="EAGLE-3 has the layouts safeailab and speculators"):
            convert(tmp_path / "a", tmp_path / "d", layout, target)


def test_transformers_generates_with_the_folder_as_it_is(target, tmp_path):
    """The same tokens and as many rounds as ours, windows included."""
    from transformers import AutoModel

    for number, changes in enumerate(({}, {"windows": (6, 6)})):
        folder = source(target, tmp_path / f"a{number}", **changes)
        convert(folder, tmp_path / f"b{number}", "transformers", target)
        theirs = AutoModel.from_pretrained(tmp_path / f"b{number}", dtype=torch.float32).eval()
        assert type(theirs).__name__ == assistant.ARCHITECTURE
        calls: list[int] = []
        theirs.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        prompt = torch.tensor([tiny.prompt(9, 2)])
        out = target.model.generate(
            prompt, assistant_model=theirs, speculation_type="dflash", max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        request = run(target, load_drafter(folder, target), [tiny.prompt(9, 2)], max_new_tokens=24)[0]
        assert out[0, 9:].tolist() == request.output
        assert abs(len(calls) - request.rounds) <= 1  # the prompt, and the end


# ---- GGUF


def test_gguf_holds_the_targets_tokenizer_and_keys(target, tmp_path):
    convert(source(target, tmp_path / "a"), tmp_path / "d.gguf", "gguf", target)
    fields = {name: field.contents() for name, field in package.GGUFReader(tmp_path / "d.gguf").fields.items()}
    assert fields["general.architecture"] == "dflash"
    assert fields["dflash.target_layers"] == [1, 2, 4]
    assert fields["tokenizer.ggml.mask_token_id"] == 3
    assert fields["dflash.attention.causal"] is False
    assert fields["dflash.block_size"] == 8
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == target.embedding.num_embeddings
    for i in (5, 20, 200):
        assert tokens[i] == target.tokenizer.convert_ids_to_tokens(i)
    assert fields["tokenizer.ggml.eos_token_id"] == target.tokenizer.eos_token_id


def test_a_tokenizer_of_an_unknown_rule_is_refused(target, tmp_path, monkeypatch):
    from blockdraft.formats import tokenizer

    monkeypatch.setattr(tokenizer, "_rule", lambda told: None)
    with pytest.raises(UsageError, match="a rule that has no known name in llama.cpp; give the target as a .gguf file"):
        convert(source(target, tmp_path / "a"), tmp_path / "d.gguf", "gguf", target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


RULES = {
    "gpt-2": {"type": "ByteLevel", "use_regex": True},
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]},
    "qwen2": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": LETTERS + r"\p{N}" + REST},
            },
            {"type": "ByteLevel", "use_regex": False},
        ],
    },
}


@pytest.mark.parametrize("name", RULES)
def test_splitting_rules_by_name(name):
    assert _rule({"pre_tokenizer": RULES[name]}) == name
    assert _rule({"pre_tokenizer": {"type": "Metaspace"}}) is None


def test_files_from_before_the_merge_are_read(target, tmp_path):
    """Architecture ``dflash-draft``, plain layer ids, the mask token among the drafter's keys, other names for two tensors."""
    folder = source(target, tmp_path / "a")
    network = zlab.read(folder)
    writer = package.GGUFWriter(tmp_path / "old.gguf", "dflash-draft")
    for key, value in gguf._numbers(network.config).items():
        add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"dflash-draft.{'dflash.' if key == 'block_size' else ''}{key}", value)
    writer.add_array("dflash-draft.dflash.target_layer_ids", list(network.config.taps))
    writer.add_uint32("dflash-draft.dflash.mask_token_id", network.config.mask_token_id)
    earlier = {"fc.weight": "dflash_fc.weight", "enc.output_norm.weight": "dflash_hidden_norm.weight"}
    for name, tensor in network.state_dict().items():
        found = gguf._theirs(name).replace("ffn_norm", "post_attention_norm")
        writer.add_tensor(earlier.get(found, found), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert recognise(tmp_path / "old.gguf").trainer == "a fork of llama.cpp before the merge"
    convert(tmp_path / "old.gguf", tmp_path / "b", "zlab", target)
    assert same(folder, tmp_path / "b")


def test_quantised_files_are_read_with_a_note(target, tmp_path, recwarn):
    folder = source(target, tmp_path / "a")
    network = zlab.read(folder)
    gguf.write(network, tmp_path / "d.gguf", target, torch.float32)
    reader = package.GGUFReader(tmp_path / "d.gguf")
    writer = package.GGUFWriter(tmp_path / "q.gguf", "dflash")
    for name, field in reader.fields.items():
        if name.startswith("dflash.") or name == "tokenizer.ggml.mask_token_id":
            kinds = field.types
            more = {"sub_type": kinds[-1]} if kinds[0] == package.GGUFValueType.ARRAY else {}
            writer.add_key_value(name, field.contents(), kinds[0], **more)
    kind = package.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0:
            writer.add_tensor(tensor.name, package.quantize(np.array(tensor.data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = gguf.read(tmp_path / "q.gguf", target)
    assert any("is quantised (Q8_0)" in str(found.message) for found in recwarn)
    torch.testing.assert_close(again.fc.weight, network.fc.weight, atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        ("gguf", {"causal": (True, False)}, "layers of this one differ"),
        ("gguf", {"softcap": 30.0}, "scales and caps no logits"),
        ("transformers", {"convolution": (2, 8), "selector": (12, 4)}, "cannot say this of a drafter: convolutions and selector"),
        ("transformers", {"causal": (True, True)}, "cannot say this of a drafter: causal layers"),
        ("transformers", {"embedding_scale": 2.0}, "an embedding scale of 2 for a target that scales by 1"),
        ("transformers", {"output_multiplier": 0.5}, "an output multiplier or soft cap"),
        ("speculators", {"embedding_scale": 2.0}, "no place for the drafter's embedding scale"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(layout, changes, sentence, target, tmp_path):
    network = random_drafter(target, **changes).network
    with pytest.raises(UsageError, match=sentence):
        module._write(network, tmp_path / "d", layout, target)


# ---- dialects


def test_dialects_are_told_apart(target, tmp_path):
    folder = source(target, tmp_path / "a")
    assert recognise(folder).family == "DFlash"
    cases = {
        "DSpark": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "num_anchors": 512},
        "Domino": {"dflash_config": {"projector_type": "domino", "shift_label": True}},
        "a DFlash with shifted slots": {"dflash_config": {"shift_label": True}},
    }
    for family, changes in cases.items():
        other = tmp_path / family
        shutil.copytree(folder, other)
        rewrite(other, changes)
        found = recognise(other)
        assert found.family == family
        assert found.refused
        assert set(found.into().values()) == {found.refused}
        with pytest.raises(UsageError, match="cannot be converted to gguf"):
            convert(other, tmp_path / "x.gguf", "gguf", target)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"architectures": ["ViTModel"]}')
    with pytest.raises(UsageError, match="of no drafter that is known here"):
        recognise(tmp_path / "none")


def test_torchspec_folders_become_zlab(target, tmp_path):
    folder = source(target, tmp_path / "a")
    other = tmp_path / "b"
    shutil.copytree(folder, other)
    raw = json.loads((other / "config.json").read_text())
    nested = raw.pop("dflash_config")
    for key in ("block_size", "is_causal", "rope_scaling", "rope_theta"):
        raw.pop(key)
    raw |= {"model_type": "dflash", "num_target_layers": 3, "target_num_hidden_layers": len(target.layers)}
    raw |= {key: nested[key] for key in ("mask_token_id", "target_layer_ids")}
    (other / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for theirs, ours in torchspec.NAMES.items():
        tensors[f"{theirs}weight"] = tensors.pop(f"{ours}weight")
    save_file({**tensors, "embed_tokens.weight": target.embedding.weight.detach().clone()}, other / "model.safetensors")
    with pytest.raises(UsageError, match="says no block_size"):
        convert(other, tmp_path / "c", "zlab", target)
    (other / "config.json").write_text(json.dumps({**raw, "block_size": 8}))
    convert(other, tmp_path / "c", "zlab", target)
    assert same(folder, tmp_path / "c")


# ---- the command, and what goes wrong


def run_cli(target, *arguments):
    return main(["convert", *map(str, arguments), "--target", target.name, "--dtype", "float32"])


def test_the_command_says_what_it_compared(target, tmp_path, capsys):
    folder = source(target, tmp_path / "a")
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators") == 0
    out = capsys.readouterr().out
    assert "24 tensors equal to the bit" in out or "tensors equal to the bit" in out
    assert "draft logits equal on a text of" in out
    assert main(["inspect", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["family"], told["layout"], told["block"], told["tapped layers"]) == ("DFlash", "speculators", 8, [0, 1, 3])
    assert told["converts_to"] == ["zlab", "speculators", "gguf", "transformers"]
    assert main(["inspect", str(folder)]) == 0
    assert "converts to      zlab, speculators, gguf, transformers" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["zlab", "speculators", "gguf", "transformers"])
def test_a_window_is_shown(layout, target, tmp_path, capsys):
    """What a doctor may have to settle later is seen at a glance, in every layout."""
    place = tmp_path / ("b.gguf" if layout == "gguf" else "b")
    convert(source(target, tmp_path / "a", windows=(6, 6)), place, layout, target)
    assert main(["inspect", str(place), "--json"]) == 0
    size = 5 if layout == "transformers" else 6  # which counts one token more
    assert json.loads(capsys.readouterr().out)["sliding window"] == f"{size} tokens, 2 of 2 layers"
    if layout == "zlab":
        rewrite(place, {"use_sliding_window": False})
        main(["inspect", str(place)])
        assert "6 tokens, 2 of 2 layers, switched off (blockdraft doctor" in capsys.readouterr().out
    convert(source(target, tmp_path / "c"), tmp_path / "d", "zlab", target)
    main(["inspect", str(tmp_path / "d")])
    assert "sliding" not in capsys.readouterr().out


def test_unknown_keys_are_listed(target, tmp_path, capsys):
    folder = source(target, tmp_path / "a")
    rewrite(folder, {"colour": "red", "shape": 3})
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators") == 2
    assert "keys that are not known here: colour, shape" in capsys.readouterr().err
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators", "--ignore", "colour", "--ignore", "shape") == 0
    assert "colour" not in (tmp_path / "b" / "config.json").read_text(), "what is ignored is lost"
    assert run_cli(target, folder, tmp_path / "c", "--to", "zlab", "--ignore", "nonsense") == 2
    assert "--ignore nonsense has no effect" in capsys.readouterr().err


def test_nothing_of_the_users_is_lost(target, tmp_path, capsys):
    """A drafter may be replaced under --force; anything else, and everything around SRC and the target, stays."""
    folder = source(target, tmp_path / "drafters" / "a")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    cases = [
        (folder, "zlab", "would overwrite"),
        (tmp_path / "drafters", "zlab", "would overwrite"),
        (folder / "sub", "zlab", "or lie in it"),
        (folder / "sub.gguf", "gguf", "or lie in it"),
        (Path(target.name), "zlab", "would overwrite"),
        (mine, "zlab", "holds more than a drafter (precious.txt)"),
        (tmp_path / "file", "zlab", "is a file already"),
        (tmp_path / "file" / "sub", "zlab", "file is a file"),
        (tmp_path / "link", "zlab", "is a link"),
        (tmp_path / "dangling", "zlab", "is a link"),
        (tmp_path / "out", "gguf", "has no suffix .gguf"),
    ]
    for destination, layout, sentence in cases:
        assert run_cli(target, folder, destination, "--to", layout, "--force") == 2, destination
        err = capsys.readouterr().err
        assert sentence in err
        assert err.count("\n") == 1
    (tmp_path / "x.gguf").mkdir()
    assert run_cli(target, folder, tmp_path / "x.gguf", "--to", "gguf") == 2
    assert "--force" not in capsys.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (mine / "precious.txt").read_text() == (tmp_path / "file").read_text() == "kept"
    assert run_cli(target, folder, tmp_path / "b", "--to", "zlab") == 0
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators") == 2
    assert "exists; use --force" in capsys.readouterr().err
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators", "--force") == 0
    assert recognise(tmp_path / "b").layout == "speculators"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_was_there_comes_back_when_the_last_step_fails(target, tmp_path, monkeypatch):
    folder = source(target, tmp_path / "a")
    convert(folder, tmp_path / "b", "zlab", target)
    before = (tmp_path / "b" / "config.json").read_bytes()
    right = Path.rename

    def rename(self, place):
        if self.parent.name.startswith(".b.") and self.name == "b":
            raise OSError(28, "No space left on device")
        return right(self, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(BlockdraftError, match="No space left on device"):
        convert(folder, tmp_path / "b", "speculators", target, force=True)
    assert (tmp_path / "b" / "config.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_shortlist_and_the_targets_name_go_with_it(target, tmp_path):
    from blockdraft.drafters.shortlist import write_shortlist

    folder = source(target, tmp_path / "a")
    write_shortlist(list(range(20)), folder)
    (folder / "target.json").write_text("{}")
    assert "the shortlist of 20 words goes with it" in convert(folder, tmp_path / "b", "zlab", target)
    assert (tmp_path / "b" / "shortlist.json").read_text() == (folder / "shortlist.json").read_text()
    assert (tmp_path / "b" / "target.json").exists()


def damaged(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-50])
    elif how == "nan":
        rewrite(folder, None, {"norm.weight": torch.full((32,), float("nan"))})
    elif how == "missing":
        rewrite(folder, None, {"norm.weight": None, "fc.weight": None})
    elif how == "extra":
        rewrite(folder, None, {"more.weight": torch.ones(3)})
    elif how == "pickle":
        weights.unlink()
        torch.save({"fc.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "no taps":
        rewrite(folder, {"num_target_layers": None})


FAULTS = {
    "truncated": "is damaged or no safetensors file",
    "nan": "not finite",
    "missing": "missing: fc.weight, norm.weight",
    "extra": "unknown: more.weight",
    "pickle": "has no model.safetensors",
    "no config": "has no config.json",
    "no taps": "has no 'num_target_layers'",
}


@pytest.mark.parametrize("how", FAULTS)
def test_bad_input_is_one_sentence_and_leaves_nothing(how, target, tmp_path, capsys):
    folder = source(target, tmp_path / "a")
    damaged(folder, how)
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators") == 2
    err = capsys.readouterr().err
    assert FAULTS[how] in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_bad_files_are_no_drafters(target, tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    good = tmp_path / "good.gguf"
    gguf.write(random_drafter(target).network, good, target)
    (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:-3000])
    for name, sentence in (("x.gguf", "GGUF"), ("cut.gguf", "no whole GGUF file"), ("nowhere", "no drafter folder or .gguf file")):
        assert run_cli(target, tmp_path / name, tmp_path / "b", "--to", "zlab") == 2, name
        err = capsys.readouterr().err
        assert sentence in err
        assert err.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_a_full_disk_leaves_the_destination_untouched(target, tmp_path, capsys, monkeypatch):
    folder = source(target, tmp_path / "a")
    convert(folder, tmp_path / "b", "zlab", target)
    before = (tmp_path / "b" / "config.json").stat().st_mtime_ns

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.zlab, "write", full)
    assert run_cli(target, folder, tmp_path / "b", "--to", "zlab", "--force") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "b" / "config.json").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_writer_that_errs_is_found_out(target, tmp_path, monkeypatch):
    """Tensors, settings and drafts are compared: each kind of fault is caught."""
    folder = source(target, tmp_path / "a")
    right = zlab.write

    def another_tensor(network, place, dtype):
        with torch.no_grad():
            network.norm.weight[0] += 1
        right(network, place, dtype)
        with torch.no_grad():
            network.norm.weight[0] -= 1

    def another_setting(network, place, dtype):
        right(network, place, dtype)
        rewrite(place, {"rms_norm_eps": 1e-3})

    for wrong, sentence in ((another_tensor, "tensor norm.weight differs"), (another_setting, "rms_norm_eps is 0.001, not")):
        monkeypatch.setattr(module.zlab, "write", wrong)
        with pytest.raises(BlockdraftError, match=sentence):
            convert(folder, tmp_path / "b", "zlab", target)
        assert not (tmp_path / "b").exists()


WRONG = [
    {"dflash_config": [1]},
    {"dflash_config": "x"},
    {"architectures": 5},
    {"dflash_config": {"target_layer_ids": 5, "mask_token_id": 3}},
    {"dflash_config": {"target_layer_ids": "abc", "mask_token_id": 3}},
    {"dflash_config": {"target_layer_ids": [None], "mask_token_id": 3}},
    {"block_size": 10**18, "dflash_config": {"mask_token_id": 3}},
    {"hidden_size": 10**30},
    {"is_causal": "false"},
    {"layer_types": 7},
    {"rope_parameters": 3},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_values_of_a_wrong_kind_are_one_sentence(changes, target, tmp_path, capsys):
    folder = source(target, tmp_path / "a")
    rewrite(folder, changes)
    assert run_cli(target, folder, tmp_path / "b", "--to", "speculators") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "defect" not in err
    assert len(err) < 500
    main(["inspect", str(folder)])
    assert "defect" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


ODD = {
    "zlab": [
        {"block_size": 1, "dflash_config.block_size": 1},
        {"dflash_config.output_multiplier": 0},
        {"dflash_config.input_embedding_scale": float("nan")},
        {"max_position_embeddings": -1},
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 10**12},
    ],
    "speculators": [
        {"block_size": 0},
        {"mask_token_id": 1.7},
        {"aux_hidden_state_layer_ids": [1.5, 2, 4]},
        {"sliding_window_non_causal": "no"},
        *({"transformer_layer_config.sliding_window": window} for window in (-1, 0)),
    ],
    "transformers": [{"block_size": 0}, {"mask_token_id": 1.7}, *({"sliding_window": window} for window in (-1, 0, "9"))],
}


@pytest.mark.parametrize(("layout", "changes"), [(layout, case) for layout, cases in ODD.items() for case in cases], ids=str)
def test_numbers_that_nothing_can_be_drafted_with_are_named(layout, changes, target, tmp_path, capsys):
    """Whatever the layout: the file, the key and the value; no conversion, no run of a drafter without slots or sight."""
    windows = (6, 6) if layout != "zlab" else (None, None)
    convert(source(target, tmp_path / "a", windows=windows), tmp_path / "b", layout, target)
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        outer, _, inner = key.rpartition(".")
        (config[outer] if outer else config)[inner] = value
    path.write_text(json.dumps(config))
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "zlab", "--target", target.name]) == 2
    error = capsys.readouterr().err
    name = list(changes)[-1].rpartition(".")[2].removeprefix("input_")
    assert f"{path} " in error
    assert f"{name} is " in error
    assert not (tmp_path / "c").exists()


def test_contradicting_rotary_bases_are_said(target, tmp_path):
    place = source(target, tmp_path)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"rope_theta": 5e6}))
    with pytest.warns(UserWarning, match=r"rope_theta is 5000000.0 on top and .* in rope_parameters"):
        zlab.read_config(place)


def test_scaled_embeddings_and_transformers_assistant(tmp_path):
    """A target whose embedding module scales: the assistant is given its output, so the drafter's scale must be that."""
    gemma = tiny.target("gemma2")
    scale = gemma.hidden_size**0.5
    network = random_drafter(gemma, embedding_scale=scale).network
    (tmp_path / "a").mkdir()
    zlab.write(network, tmp_path / "a", torch.float32)
    convert(tmp_path / "a", tmp_path / "b", "transformers", gemma)
    assert load_drafter(tmp_path / "b", gemma).config.embedding_scale == pytest.approx(scale, rel=1e-5)
    with pytest.raises(UsageError, match="an embedding scale of 1 for a target that scales by"):
        assistant.write(random_drafter(gemma).network, tmp_path / "a", gemma)


def rewritten(target, place, **changes):
    """A GGUF of a random drafter with keys changed or added."""
    gguf.write(random_drafter(target).network, place, target, torch.float32)
    reader = package.GGUFReader(place)
    writer = package.GGUFWriter(place.with_suffix(".new"), "dflash")
    for name, field in reader.fields.items():
        if name.startswith("dflash.") or name == "tokenizer.ggml.mask_token_id":
            more = {"sub_type": field.types[-1]} if field.types[0] == package.GGUFValueType.ARRAY else {}
            writer.add_key_value(name, field.contents(), field.types[0], **more)
    for key, value in changes.items():
        add = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}.get(type(value))
        if add is not None:
            add(f"dflash.{key}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for key, value in changes.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    place.with_suffix(".new").rename(place)
    return place


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention.value_scale": 0.5}, "attention.value_scale"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"colour": 3}, "keys that are not known here: dflash.colour"),
        ({"output.weight": np.ones((20, 32), np.float32)}, "brings its own head"),
    ],
)
def test_nothing_that_a_gguf_says_is_dropped(changes, sentence, target, tmp_path):
    file = rewritten(target, tmp_path / "d.gguf", **changes)
    with pytest.raises(UsageError, match=sentence):
        convert(file, tmp_path / "b", "zlab", target)


def test_settings_that_float32_rounds_are_the_same(target, tmp_path):
    folder = source(target, tmp_path / "a", embedding_scale=5.656854)
    convert(folder, tmp_path / "d.gguf", "gguf", target)
    convert(tmp_path / "d.gguf", tmp_path / "b", "zlab", target)
    assert zlab.read(tmp_path / "b").config.embedding_scale == pytest.approx(5.656854, rel=1e-6)


def test_dtypes_that_no_drafter_has_are_refused(target, tmp_path):
    folder = source(target, tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    for dtype, name in ((torch.float64, "float64"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / "model.safetensors")
        with pytest.raises(UsageError, match=f"tensors of {name}; a drafter has one dtype"):
            convert(folder, tmp_path / "b", "zlab", target)


def test_a_large_speculators_drafter_is_not_taken_for_a_reduced_one(tmp_path):
    """Keys equal to the class's defaults are absent from its file: vocabulary and width of Qwen3-8B are such."""
    raw = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "draft_vocab_size": 151936,
        "target_hidden_size": 4096,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 16,
        "mask_token_id": 151669,
        "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = recognise(tmp_path)
    assert (found.facts["vocabulary"], found.facts["width"], found.facts["tapped layers"]) == (151936, 4096, [1, 9, 17, 25, 33])
    assert found.into()["zlab"] is None
    (tmp_path / "config.json").write_text(json.dumps({**raw, "draft_vocab_size": 32000}))
    assert "reduced to 32000 words" in recognise(tmp_path).into()["speculators"]
