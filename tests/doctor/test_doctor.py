"""The doctor names the fault of a broken copy first, and has nothing to say of a healthy pair."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from blockdraft.cli.main import main
from blockdraft.doctor import diagnosis as doctor
from blockdraft.doctor import readings as readings_of
from blockdraft.doctor import scoring
from blockdraft.doctor.diagnosis import Diagnosis, _judge_modes, diagnose
from blockdraft.doctor.readings import _with_rope, readings
from blockdraft.doctor.scoring import Score, _compared
from blockdraft.drafters.network import DFlash
from blockdraft.errors import UsageError
from blockdraft.formats import zlab
from blockdraft.load import load_target
from blockdraft.prompts import encode
from blockdraft.training.blocks import Blocks, block_embeddings
from blockdraft.training.loss import LossRule, Words, block_loss
from tests import tiny
from tests.doubles import dflash_config, random_drafter
from tests.recipes import answered

TEXTS = ("one two", "why", "more", "the sea", "count", "a b c", "x", "and so on", "go", "1 2 3", "far", "and then")
CONVERSATIONS = [[{"role": "user", "content": text}] for text in TEXTS]
WIDTH = 8


@pytest.fixture(scope="module", autouse=True)
def _short():
    """Short answers are learnt sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "TOKENS", 30)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    tiny.save_folder(folder)
    return load_target(folder, dtype="float32")


def learn(target, steps=250, shifted=False, normed=False, raw=False, **changes):
    """A small drafter, overfitted to the answers to the conversations, as its config says (or, if asked, otherwise)."""
    prompts = [encode(target, c[0]["content"], raw=True) if raw else encode(target, c) for c in CONVERSATIONS]
    network = random_drafter(target, seed=1, **changes).network.requires_grad_(True)
    blocks, config = Blocks(network).train(), network.config
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    words, generator = Words(target.head.weight.detach()), torch.Generator().manual_seed(0)
    rows = []
    for prompt in prompts:
        ids = torch.tensor([[*prompt, *answered(target, prompt, doctor.TOKENS)]])
        features, last = target.read(ids, config.taps)
        pieces = list(features.split(target.hidden_size, dim=-1))
        pieces[-1] = last if normed else pieces[-1]
        rows.append((ids, len(prompt), torch.cat(pieces, dim=-1).clone()))
    with torch.enable_grad():
        for step in range(steps):
            ids, start, features = rows[step % len(rows)]
            anchors = torch.randint(start, ids.shape[1] - 1, (24,), generator=generator).sort().values[None]
            embeddings = block_embeddings(network, target.embed, ids, anchors, WIDTH)
            positions = torch.arange(ids.shape[1])[None]
            hidden = blocks(embeddings, features, anchors, positions, torch.zeros_like(positions), WIDTH)[0]
            hidden = hidden[:, :-1] if shifted else hidden[:, 1:]
            index = anchors[0, :, None] + torch.arange(1, WIDTH)
            labels = pad(ids[0], (0, WIDTH))[index]
            total, weight, *_ = block_loss(hidden, labels, index < ids.shape[1], None, words, LossRule())
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
    return network.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def healthy(target):
    return learn(target, steps=400, taps=(1, 2, 3), mask_token_id=5)


def broken(network, **changes):
    other = DFlash(replace(network.config, **changes))
    other.load_state_dict(network.state_dict())
    return other.requires_grad_(False)


def examine(network, target, folder=None):
    found = None
    for _, found in diagnose(network, target, CONVERSATIONS, folder, anchors=150):
        pass
    return found


def test_a_healthy_pair_gets_no_alarm(healthy, target):
    found = examine(healthy, target)
    assert found.verdict == "healthy"
    assert found.faults == []
    assert found.mended is None
    assert found.acceptance_length > 2
    assert found.anchors > 150
    assert {score.name for score in found.scores} >= {"tapped layers [0, 1, 2]", "slots shifted by one", "causal blocks"}


def other_theta(config):
    return _with_rope(config, {"rope_type": "default", "rope_theta": 20.0})


FAULTS = {
    "layer ids one too high": ({"taps": (2, 3, 4)}, "its tapped layers [2, 3, 4] are counted one too high: [1, 2, 3] fit better"),
    "layer ids one too low": ({"taps": (0, 1, 2)}, "its tapped layers [0, 1, 2] are counted one too low: [1, 2, 3] fit better"),
    "window": ({"windows": (2, 2)}, "its sliding window of 2 tokens is not what it was trained with"),
    "embedding scale": ({"embedding_scale": 30.0}, "its input_embedding_scale is 1, not 30"),
    "mask token": ({"mask_token_id": 9}, "its mask token is 5, not 9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_copy_is_told_by_its_fault(fault, healthy, target, monkeypatch):
    monkeypatch.setattr(readings_of, "_masks", lambda config, target: [i for i in (5, 6) if i != config.mask_token_id])
    changes, sentence = FAULTS[fault]
    found = examine(broken(healthy, **changes), target)
    assert found.verdict == "fault"
    assert found.faults[0].startswith(sentence)
    assert found.mended is not None
    for field, value in vars(healthy.config).items():
        if field != "backbone":
            assert getattr(found.mended, field) == value


def test_a_wrong_rotary_base_is_told(healthy, target):
    copy = DFlash(other_theta(healthy.config))
    copy.load_state_dict(healthy.state_dict())
    found = examine(copy, target)
    assert found.faults[0] == "its rotary base (rope_theta) is 10000 like the target, not 20"
    assert dict(found.mended.backbone.rope_parameters)["rope_theta"] == 10000.0


def test_the_causality_of_blocks_is_told(target, monkeypatch):
    """Twelve short answers are few for this fault: less certainty is asked for here."""
    monkeypatch.setattr(scoring, "SURE", 1.5)
    causal = learn(target, steps=400, causal=(True, True))
    found = examine(broken(causal, causal=(False, False)), target)
    assert found.faults[0] == "its blocks were trained causal, and are read bidirectional"
    assert found.mended.causal == (True, True)


def test_a_window_that_the_file_does_not_say_is_told(target, monkeypatch):
    monkeypatch.setattr(readings_of, "WINDOWS", (2, 8, 1000))
    trained = learn(target, taps=(1, 2, 3), mask_token_id=5, windows=(2, 2))
    found = examine(broken(trained, windows=(None, None)), target)
    assert found.faults[0].startswith("a sliding window of 2 tokens fits better than the full attention")
    assert found.mended is not None
    assert found.mended.windows == (2, 2)
    assert "sliding window 1000" not in {score.name for score in found.scores}, "no text is as long: it could show nothing"


# What is trained, the window in the file, what else it says, what the doctor says of the window, and which one it writes.
DOUBTS = {
    "trained with it": ((2, 2), 2, {}, "; the window that it names fits better", (2, 2)),
    "trained without it": ((None, None), 2, {}, "; the window that it names does not fit: full attention is better", (None, None)),
    "too large to be seen": ((None, None), 1000, {}, "; the window that it names fits as well here", (1000, 1000)),
    "of no size": ((2, 2), None, {}, "; 2 tokens fit best of those tried", (2, 2)),
    "of no size, and none fits": ((None, None), None, {}, "; no window that was tried fits better than full attention", None),
    "with another fault": ((2, 2), 2, {"mask_token_id": 9}, "; the window that it names fits", (2, 2)),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_a_window_that_is_switched_off_is_told_first(case, target, tmp_path, capsys, monkeypatch):
    """``use_sliding_window`` was not saved, and with it went the window: every runtime makes of it what it likes."""
    monkeypatch.setattr(readings_of, "WINDOWS", (2, 8, 1000))
    monkeypatch.setattr(readings_of, "_masks", lambda config, target: [i for i in (5, 6) if i != config.mask_token_id])
    trained, said, wrong, verdict, right = DOUBTS[case]
    network = learn(target, steps=200, taps=(1, 2, 3), mask_token_id=5, windows=trained)
    zlab.write(broken(network, windows=(2, 2), **wrong), tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["use_sliding_window"], config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config | ({"sliding_window": said} if said else {})))
    probe = tmp_path / "probe.jsonl"
    probe.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    command = ["doctor", "--drafter", str(tmp_path), "--target", target.name, "--probe", str(probe)]
    mended = tmp_path.parent / f"{tmp_path.name}-mended" / "new"  # in a folder that is not there yet
    assert main([*command, "--fix", str(mended)]) == 1
    first = capsys.readouterr().out.splitlines()[1]
    assert "it has sliding_attention layers but no window in force" in first
    assert verdict in first
    assert mended.exists() == (right is not None)
    if right is not None:
        found = zlab.read(mended).config
        assert (found.windows, found.mask_token_id) == (right, 5)


def test_a_window_over_all_layers_needs_no_other(healthy, target, tmp_path):
    """``use_swa`` rules every layer, whatever ``use_sliding_window`` says."""
    zlab.write(healthy, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 2
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert zlab.read_config(tmp_path).windows == (16, 16)
    del config["dflash_config"]["swa_window_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="swa_window_size is None, not a whole number"):
        zlab.read_config(tmp_path)


def test_where_the_mended_drafter_goes_is_checked_before_the_work(healthy, target, tmp_path, capsys):
    zlab.write(healthy, tmp_path, torch.float32)
    (tmp_path / "file").write_text("")
    for place, told in ((tmp_path / "in", "or lie in it"), (tmp_path / "file" / "x", "file is a file")):
        assert main(["doctor", "--drafter", str(tmp_path), "--target", target.name, "--fix", str(place)]) == 2
        assert told in capsys.readouterr().err


def test_shifted_slots_are_told_and_cannot_be_mended(target):
    found = examine(learn(target, shifted=True), target)
    assert found.faults[0].startswith("its slots predict the token behind their own position")
    assert found.mended is None


def test_a_last_tap_behind_the_final_norm_is_told(target):
    found = examine(learn(target, normed=True, taps=(0, 2, 4)), target)
    assert found.faults[0].startswith("its last tapped layer 4 was read behind the target's final norm")
    assert found.mended is None


def test_a_drafter_of_plain_text_is_told_by_the_template(target):
    found = examine(learn(target, steps=300, raw=True), target)
    assert "it was probably trained on the former" in found.faults[0]
    assert "with no template" in found.faults[0]


def test_thinking_modes_are_compared():
    found = Diagnosis(modes={"chat template": 1.2, "no template": 1.2, "thinking": 1.9, "no thinking": 1.2})
    _judge_modes(found)
    assert len(found.faults) == 1
    assert found.faults[0].startswith("it accepts 1.90 tokens a round with thinking and 1.20 with the chat template")


def test_sizes_that_do_not_fit_are_said_at_once(target):
    for changes, sentence in (
        ({"target_layers": 7}, "a target of 7 layers"),
        ({"mask_token_id": 999}, "mask token id 999"),
        ({"taps": (1, 0, 3)}, "that do not increase"),
    ):
        found = examine(random_drafter(target, **changes).network, target)
        assert found.verdict == "fault"
        assert sentence in found.faults[0]
        assert found.acceptance_length is None


def test_other_weights_of_the_target_are_told(healthy, target, tmp_path):
    zlab.write(healthy, tmp_path, torch.float32)
    (tmp_path / "target.json").write_text(json.dumps({"weights_sha256": "0" * 64}))
    found = examine(healthy, target, tmp_path)
    assert found.faults[0].startswith("the target's weights are not those it was trained for")
    (tmp_path / "target.json").write_text(json.dumps({"weights_sha256": target.digest}))
    assert examine(healthy, target, tmp_path).verdict == "healthy"


def test_an_untrained_drafter_is_undecided(target):
    found = examine(random_drafter(target).network, target)
    assert found.verdict == "undecided"
    assert found.mended is None


def test_the_interval_is_that_of_conversations():
    """A difference in every conversation is sure; the same mean from one conversation alone is not."""
    plain = [torch.ones(50, dtype=torch.float64) for _ in range(20)]
    everywhere = [row + 0.1 for row in plain]
    once = [row + (2.0 if i == 3 else 0.0) for i, row in enumerate(plain)]
    reading = next(readings(dflash_config(tiny.target("llama")), tiny.target("llama"), 0))
    sure, unsure = (_compared(reading, other, plain) for other in (everywhere, once))
    assert sure.difference == pytest.approx(0.1) and unsure.difference == pytest.approx(0.1)
    assert sure.better(1.0) and not unsure.better(1.0)
    assert not Score("", "", 9, 2.0, 0.005, 0.004, 0.006).better(1.0), "sure, and not worth a word"


def test_few_conversations_decide_nothing(healthy, target):
    """One alone has no spread: whatever fits it better is chance."""
    copy = broken(healthy, taps=(0, 1, 2))
    for count, verdict in ((1, "undecided"), (12, "fault")):
        for _, found in diagnose(copy, target, CONVERSATIONS[:count], anchors=25 * count):
            pass
        assert found.verdict == verdict
        assert (found.mended is None) == (count == 1)
    assert scoring._quantile(11) > scoring._quantile(100) > 3.3


def test_odd_targets_and_files(healthy, target, tmp_path, monkeypatch):
    zlab.write(healthy, tmp_path, torch.float32)
    (tmp_path / "target.json").write_text("{")
    assert any("is damaged" in note for note in examine(healthy, target, tmp_path).notes)
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    found = examine(healthy, target)
    assert set(found.modes) == {"no template"}
    monkeypatch.setattr(doctor, "_answers", lambda target, prompts: [])
    with pytest.raises(UsageError, match="ends every answer at once"):
        examine(healthy, target)


def test_the_command(healthy, target, tmp_path, capsys):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    zlab.write(broken(healthy, taps=(0, 1, 2)), wrong, torch.float32)
    probe = tmp_path / "probe.jsonl"
    probe.write_text("".join(json.dumps({"messages": c}) + "\n" for c in CONVERSATIONS))
    where = ["--target", target.name, "--dtype", "float32", "--probe", str(probe)]
    assert main(["doctor", "--drafter", str(wrong), *where, "--fix", str(tmp_path / "mended")]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("FAULT\n  its tapped layers [0, 1, 2] are counted one too low")
    assert "only " in printed.out, "so few anchors are not enough for small faults, and it says so"
    assert zlab.read(tmp_path / "mended").config.taps == (1, 2, 3)
    assert main(["doctor", "--drafter", str(tmp_path / "mended"), *where, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["faults"], told["can_fix"]) == ("healthy", [], False)
    assert main(["doctor", "--drafter", str(tmp_path / "mended"), *where, "--fix", str(tmp_path)]) == 2
    assert "exists; name another place" in capsys.readouterr().err
