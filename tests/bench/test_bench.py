"""The benchmark: figures from known answers, peers that say the same, and a result file whose every field is there."""

import json
import statistics
import subprocess

import pytest
import torch

from blockdraft.bench import runner
from blockdraft.bench.methods import NO_COPIES, Answer, Engine, Transformers, make_method
from blockdraft.bench.report import means
from blockdraft.bench.runner import Measured, figures
from blockdraft.bench.tasks import DATASETS, Task, own_tasks, read_tasks
from blockdraft.cli.main import main
from blockdraft.errors import UsageError
from blockdraft.formats.transformers import AssistantDrafter
from blockdraft.load import load_drafter, load_target
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import random_drafter
from tests.drafters import test_parity

FIELDS = set(
    "task source method prompts new_tokens rounds acceptance_length acceptance_by_position first_slot_acceptance accepted_lengths "
    "tokens_per_second end_to_end_tokens_per_second time_to_first_token_s speedup speedup_low speedup_high identical_to_ar "
    "model_bytes extra_bytes time_split plain_rounds".split()
)


@pytest.fixture(scope="module")
def pair(tiny_folder, tmp_path_factory):
    target = load_target(tiny_folder, dtype="float32")
    folder = tmp_path_factory.mktemp("drafter")
    test_parity.save_pair(folder, target, vocab_size=260)
    return target, load_drafter(folder, target), folder


def answer(count, seconds, accepted=(), ids=None):
    return Answer(ids or list(range(count)), "", 0.5, seconds, seconds, len(accepted), list(accepted), seconds, 0.1, 0.2)


def of(*prompts):
    """One prompt to a batch, each with its repeats."""
    measured = Measured()
    for repeats in prompts:
        measured.add([repeats])
    return measured


def test_figures_of_known_answers():
    plain = of([answer(11, 10.0)], [answer(21, 10.0)], [answer(5, 2.0)])
    fast = of([answer(11, 5.0, [2, 0, 5])], [answer(21, 2.5, [9, 9])], [answer(5, 2.0, [3])])
    found = figures(fast, plain, True, 0)
    assert found["speedup"] == pytest.approx(2.0)  # of 2, 4 and 1
    assert (found["speedup_low"], found["speedup_high"]) == (1.0, 4.0)
    assert found["new_tokens"] == 37
    assert found["rounds"] == 6
    assert found["acceptance_length"] == pytest.approx(34 / 6)
    assert found["first_slot_acceptance"] == pytest.approx(5 / 6)
    assert found["acceptance_by_position"] == pytest.approx([5 / 6, 5 / 6, 4 / 6, 3 / 6, 3 / 6, 2 / 6, 2 / 6, 2 / 6, 2 / 6])
    assert found["accepted_lengths"] == [1, 0, 1, 1, 0, 1, 0, 0, 0, 2]
    assert found["tokens_per_second"] == pytest.approx(34 / 9.5)
    assert found["end_to_end_tokens_per_second"] == pytest.approx(37 / 11.0)
    assert found["identical_to_ar"] == 1.0
    assert found["time_split"]["other"] == pytest.approx((9.5 - 0.3 - 0.6) / 6)


def test_means_are_of_tasks():
    results = [
        {"task": task, "method": "x", "speedup": s, "acceptance_length": t, "first_slot_acceptance": None, "identical_to_ar": 1.0}
        for task, s, t in (("a", 1.0, 2.0), ("b", 2.0, 4.0))
    ]
    [mean] = means(results)
    assert (mean["task"], mean["speedup"], mean["acceptance_length"], mean["first_slot_acceptance"]) == ("mean", 1.5, 3.0, None)
    assert means(results[:1]) == []


def test_speedup_is_paired_and_times_are_medians_of_repeats():
    plain = of([answer(11, s) for s in (1.0, 9.0, 2.0)], [answer(11, 10.0)] * 3)
    fast = of([answer(11, 1.0)] * 3, [answer(11, 5.0, ids=[9] * 11)] * 3)
    found = figures(fast, plain, False, 0)
    assert found["speedup"] == pytest.approx(statistics.median([2.0, 2.0]))
    assert found["identical_to_ar"] == 0.5
    assert found["acceptance_length"] is None
    assert figures(fast, None, False, 0)["speedup"] is None


def test_a_batch_is_timed_as_a_whole(pair):
    """Its rate is that of all its prompts together; draft, verification and the rest make up each round a prompt waited for."""
    target, drafter, _ = pair
    prompts = [tiny.prompt(length, length) for length in (9, 4, 6)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    answers = Engine("dflash", target, drafter).answer(prompts, params)
    assert sum(a.wall_seconds for a in answers) < sum(a.decode_seconds for a in answers)
    for a in answers:
        assert len(a.accepted) == a.rounds
        assert 0 < a.draft_seconds + a.verify_seconds < a.decode_seconds
    measured = Measured()
    measured.add([[a] for a in answers])
    found = figures(measured, measured, True, 0)
    assert found["speedup"] == 1.0
    assert found["tokens_per_second"] == pytest.approx(57 / sum(a.wall_seconds for a in answers))
    split = found["time_split"]
    assert split["other"] > 0
    assert sum(split.values()) == pytest.approx(sum(a.round_seconds for a in answers) / found["rounds"])
    assert sum(a.round_seconds for a in answers) < sum(a.decode_seconds for a in answers), "other prompts' passes are no rounds"
    waited = [a.waited_seconds for a in answers]
    assert waited == sorted(waited) and waited[0] == 0, "each prompt waits for those before it"
    assert all(a.first_seconds > a.waited_seconds for a in answers)
    assert (found["speedup_low"], found["speedup_high"]) == (None, None), "one batch is one ratio"


def test_every_method_answers_alike(pair, tiny_folder):
    target, drafter, _ = pair
    prompts = [tiny.prompt(length, length) for length in (9, 4)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    names = ["ar", "dflash", "dflash-tree", "dflash-tree:9", NO_COPIES, "lookup", "hf", "hf-dflash"]
    methods = {name: make_method(name, target, [drafter], str(tiny_folder)) for name in names}
    expected = [methods["ar"].answer([prompt], params)[0].ids for prompt in prompts]
    for name, method in methods.items():
        found = [method.answer([prompt], params)[0] for prompt in prompts]
        assert [a.ids for a in found] == expected, name
        for a in found:
            assert a.first_seconds > 0
            assert a.decode_seconds > 0
            assert (a.rounds > 0) == method.drafted
            assert sum(a.accepted) + a.rounds >= 19 * method.drafted
    ours, theirs = (methods[name].answer([prompts[0]], params)[0] for name in ("dflash", "hf-dflash"))
    assert ours.rounds == theirs.rounds, "transformers' loop over our network takes the same rounds"
    assert [a.ids for a in methods["dflash-tree"].answer(prompts, params)] == expected
    tree, bare = methods["dflash-tree"].drafter, methods[NO_COPIES].drafter
    assert (tree.copy, bare.copy) == (True, False)
    assert tree.budget is not bare.budget, "what copies teach one, the other must not know"


@pytest.mark.parametrize("changes", [{}, {"causal": (True, False)}, {"windows": (5, None)}, {"embedding_scale": 2.0}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_assistant_drafts_as_the_drafter_does(family, changes):
    """Windows, causal layers, scales on both sides: the same number of rounds is the same drafts."""
    target, plain = tiny.target(family), tiny.model(family)
    drafter = random_drafter(target, **changes)
    prompt = tiny.prompt(11, 1)
    ours = Engine("dflash", target, drafter).answer([prompt], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]
    theirs = Transformers.__new__(Transformers)
    theirs.name, theirs.target, theirs.drafted, theirs.model = "hf-dflash", target, True, plain
    theirs.assistant = AssistantDrafter(drafter, plain)
    theirs.options = {"assistant_model": theirs.assistant, "speculation_type": "dflash"}
    found = theirs.answer([prompt], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]
    assert found.ids == ours.ids
    assert found.accepted == ours.accepted


def test_a_run_interleaves_and_takes_both_turns(pair):
    target, drafter, _ = pair
    calls = []

    class Spy(Engine):
        def answer(self, prompts, params):
            calls.append((self.name, [len(p) for p in prompts]))
            return super().answer(prompts, params)

    methods = [Spy("ar", target, None), Spy("dflash", target, drafter)]
    turns = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
    task = Task("t", "here", [turns, turns[:1], turns])
    results = []
    kept = []
    runner.run(
        *(target, [task], methods, SamplingParams(max_new_tokens=6), 1, 2, 0),
        *(lambda done: None, results, lambda: kept.append(len(results))),
    )
    assert kept == [2], "a task's results are kept as soon as it is done"
    assert [r["method"] for r in results] == ["ar", "dflash"]
    assert all(set(r) == FIELDS and r["prompts"] == 5 for r in results)
    measured = calls[2:]
    assert len(measured) == 2 * 2 * 5
    assert {name for name, _ in measured[:2]} == {"ar", "dflash"}, "each prompt is answered by all before the next"
    assert measured[4][1][0] > measured[0][1][0], "the second turn stands behind the first and its answer"
    assert len({tuple(name for name, _ in measured[i : i + 2]) for i in range(0, 20, 2)}) == 2, "in both orders"
    assert results[1]["identical_to_ar"] == 1.0


def test_prompts_that_do_not_fit_are_left_out(pair, tiny_folder, tmp_path, capsys):
    """The first one, which would warm up; and a whole task, after which the next is measured."""
    long, short = "ab " * 400, "ab"
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (long, short)))
    (tmp_path / "none.jsonl").write_text(json.dumps({"prompt": long}) + "\n")
    (tmp_path / "last.jsonl").write_text(json.dumps({"prompt": short}) + "\n")
    tasks = ",".join(str(tmp_path / f"{name}.jsonl") for name in ("some", "none", "last"))
    arguments = ["bench", "--target", str(tiny_folder), "--dtype", "float32", "--tasks", tasks, "--max-new-tokens", "1"]
    report = tmp_path / "r.html"
    assert main([*arguments, "--drafter", str(pair[2]), "--methods", "ar,dflash", "--json", "--html", str(report)]) == 0
    captured = capsys.readouterr()
    assert [(r["task"], r["prompts"]) for r in json.loads(captured.out)["results"]] == [("some", 1)] * 2 + [("last", 1)] * 2
    assert captured.err.count("leaves no room") == 2 and "no prompt of none fits into 512 tokens" in captured.err
    assert "of a round" not in report.read_text(), "one token is no round, and there is nothing to draw of it"


def test_the_revision_is_of_this_source_and_of_no_other(tmp_path, monkeypatch):
    """Installed into an environment within somebody else's work tree, it has none."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    place = tmp_path / "venv" / "runner.py"
    place.parent.mkdir()
    place.write_text("")
    (tmp_path / "theirs.txt").write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "theirs.txt"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "theirs"], check=True)
    monkeypatch.setattr(runner, "__file__", str(place))
    assert runner.revision() is None
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert runner.revision()


def test_command_writes_json_and_one_html_file(pair, tiny_folder, tmp_path, capsys):
    data = tmp_path / "mt-bench.jsonl"
    data.write_text('{"turns": ["a b", "c"]}\n{"turns": ["d"]}\n{"turns": ["e"]}\n')
    out, report = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["bench", "--target", str(tiny_folder), "--drafter", str(pair[2]), "--dtype", "float32", "--tasks", "mt-bench,own"]
    arguments += ["--data-dir", str(tmp_path), "--limit", "2", "--max-new-tokens", "8", "--methods", "ar,dflash-tree:8,hf-dflash"]
    assert main([*arguments, "--out", str(out), "--html", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "hf-dflash" in shown
    assert "own-mathematics" in shown
    assert shown.count("\nmean ") == 3
    document = json.loads(out.read_text())
    assert {"machine", "cpu_flags", "threads", "versions", "dtype", "git"} <= set(document["environment"])
    assert len(document["results"]) == 3 * 7
    assert all(set(r) == FIELDS for r in document["results"])
    assert document["results"][0]["prompts"] == 3
    text = report.read_text()
    assert text.count("data:image/png;base64,") == 4
    assert "http" not in text.replace("https://", "http")


def test_an_interrupted_run_goes_on_with_the_next_task(pair, tiny_folder, tmp_path, capsys, monkeypatch):
    """Finished tasks are neither lost nor measured again; a run of another kind begins anew."""
    out = tmp_path / "r.json"
    arguments = ["bench", "--target", str(tiny_folder), "--dtype", "float32", "--tasks", "own", "--limit", "3"]
    arguments += ["--max-new-tokens", "4", "--methods", "ar,lookup", "--json", "--out", str(out)]
    real, seen = runner.summarise, []

    def summarise(target, task, *rest):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(task.name)
        return real(target, task, *rest)

    monkeypatch.setattr(runner, "summarise", summarise)
    monkeypatch.setattr(runner, "revision", lambda: "abc")
    assert main(arguments) != 0
    broken = json.loads(out.read_text())
    assert broken["complete"] is False and [r["task"] for r in broken["results"]] == [seen[0]] * 2 + [seen[1]] * 2
    capsys.readouterr()
    seen.clear()
    monkeypatch.setattr(runner, "summarise", lambda target, task, *rest: seen.append(task.name) or real(target, task, *rest))
    assert main(arguments) == 0
    assert f"was interrupted; going on behind {broken['results'][0]['task']}" in capsys.readouterr().err
    whole = json.loads(out.read_text())
    assert whole["complete"] is True and whole["results"][:4] == broken["results"] and len(seen) == 4
    seen.clear()
    out.write_text(json.dumps(broken))
    assert main([*arguments, "--max-new-tokens", "3"]) == 0
    assert len(seen) == 6
    monkeypatch.setattr(runner, "revision", lambda: "abc-dirty")
    out.write_text(json.dumps({**broken, "environment": {**broken["environment"], "git": "abc-dirty"}}))
    seen.clear()
    assert main(arguments) == 0
    assert len(seen) == 6, "unlike states of the code are called dirty alike"
    copy = tmp_path / "a" / "same.jsonl"
    copy.parent.mkdir()
    copy.write_text('{"prompt": "a"}\n')
    (tmp_path / "same.jsonl").write_text('{"prompt": "b"}\n')
    both = ["bench", "--target", str(tiny_folder), "--tasks", f"{copy},{tmp_path / 'same.jsonl'}", "--methods", "ar"]
    assert main(both) == 2
    assert "two tasks are called same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "magic"], "method 'magic' is unknown"),
        (["--methods", "ar,ar"], "--methods names ar twice"),
        (["--methods", "dflash-tree:x"], "is unknown"),
        (["--tasks", "poems"], "task 'poems' is unknown; use gsm8k"),
        (["--tasks", "gsm8k", "--data-dir", "nowhere"], "there is no nowhere/gsm8k.jsonl"),
        (["--out", "nowhere/at/all.json"], "for all.json; make it first"),
        (["--html", "."], ". is a folder; name a file in it"),
        (["--tasks", "own", "--data-dir", "."], "--data-dir has no effect on these tasks"),
        (["--methods", "hf", "--batch", "2"], "hf is measured one prompt at a time"),
        (["--methods", "openai:http://127.0.0.1:9"], "is no OpenAI-compatible server"),
    ],
)
def test_bad_input(arguments, said, tiny_folder, capsys):
    base = ["bench", "--target", str(tiny_folder), "--tasks", "own", "--methods", "ar", "--max-new-tokens", "4", "--limit", "2"]
    assert main([*base, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_tasks():
    assert set(DATASETS) == {"gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "self-instruct"}
    own = own_tasks()
    assert [len(task.conversations) for task in own] == [8] * 6
    assert [t.name for t in read_tasks(["own"], None, 1)] == [t.name for t in own]
    with pytest.raises(UsageError, match="cannot be had from the hub"):
        read_tasks(["gsm8k"], None, 1)


def test_memory_is_counted(pair, tiny_folder):
    target, drafter, _ = pair
    engine = Engine("dflash", target, drafter)
    engine.answer([tiny.prompt(5, 0)], SamplingParams(max_new_tokens=4))
    weights = sum(p.numel() * 4 for p in drafter.network.parameters())
    assert engine.extra_bytes > weights
    assert torch.tensor(Engine("ar", target, None).extra_bytes) == 0
    assert engine.model_bytes > sum(p.numel() * 4 for p in target.model.parameters())
    theirs = make_method("hf-dflash", target, [drafter], str(tiny_folder))
    theirs.answer([tiny.prompt(5, 0)], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert theirs.model_bytes == sum(p.numel() * 4 for p in target.model.parameters())
    c = drafter.config.backbone
    entry = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4  # keys and values of a token
    assert (theirs.extra_bytes - weights) % entry == 0 and theirs.extra_bytes - weights > 12 * entry
