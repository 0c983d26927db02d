"""The command line on a tiny model folder: what it prints, where, and its exit status."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from blockdraft.cli.main import main
from blockdraft.engine import kernels
from blockdraft.errors import UsageError
from blockdraft.load import load_drafter, load_target
from tests import tiny
from tests.drafters import test_parity

FIELDS = (
    "text, token_ids, prompt_tokens, new_tokens, rounds, acceptance_length, acceptance_by_position, candidates_per_round, "
    "plain_rounds, tokens_per_second, "
    "time_to_first_token_s, finish_reason, method, target, drafter, dtype, device, kernels, seed"
).split(", ")


@pytest.fixture(scope="module")
def pair(tiny_folder, tmp_path_factory):
    """Options that name the tiny target and a random drafter for it."""
    target = load_target(tiny_folder, dtype="float32")
    folder = tmp_path_factory.mktemp("drafter")
    test_parity.save_pair(folder, target, vocab_size=260)
    load_drafter(folder, target)
    return ["--target", str(tiny_folder), "--drafter", str(folder), "--dtype", "float32", "--max-new-tokens", "20"]


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys, *arguments):
    status, out, _ = run(capsys, "generate", *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_json_has_exactly_the_documented_fields(pair, capsys):
    result = as_json(capsys, "hello", *pair)
    assert list(result) == FIELDS
    assert (result["method"], result["dtype"], result["device"], result["seed"]) == ("dflash-tree", "float32", "cpu", None)
    assert result["new_tokens"] == len(result["token_ids"]) <= 20
    assert result["rounds"] > 0  # T25: the method that is named ran
    assert result["acceptance_length"] == pytest.approx((result["new_tokens"] - 1) / result["rounds"])
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance_by_position"]), abs=1.0)
    assert len(result["acceptance_by_position"]) == 5


@pytest.fixture
def choosing():
    """A command that chooses kernels chooses for the whole process."""
    yield
    kernels.use_kernels(True)


def test_kernels_are_chosen_and_recorded(pair, choosing, capsys, tmp_path):
    """Switched off, the same answer comes from torch; a demand that cannot be met is refused."""
    here = "none" if kernels.library() is None else "layers"
    results = {how: as_json(capsys, "hello", *pair, "--compile", how) for how in ("off", "auto")}
    assert (results["off"]["kernels"], results["auto"]["kernels"]) == ("none", here)
    assert results["off"]["token_ids"] == results["auto"]["token_ids"]
    other = tiny.save_folder(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    status, _, err = run(capsys, "generate", "hello", "--target", other, "--method", "ar", "--compile", "on")
    assert status == 2 and "--compile on" in err and err.count("\n") == 1
    if here == "layers":
        assert "not like Llama's" in err
        assert as_json(capsys, "hello", *pair, "--compile", "on")["kernels"] == "layers"


def test_ar_says_so_and_has_no_acceptance(pair, capsys):
    without = [*pair[:2], *pair[4:]]
    plain, drafted = as_json(capsys, "hello", *without, "--method", "ar"), as_json(capsys, "hello", *pair)
    assert plain["token_ids"] == drafted["token_ids"]
    assert (plain["method"], plain["drafter"], plain["rounds"]) == ("ar", None, 0)
    assert plain["acceptance_length"] is None
    assert plain["acceptance_by_position"] is None


def test_text_streams_to_stdout_and_statistics_to_stderr(pair, capsys):
    text = as_json(capsys, "hello", *pair)["text"]
    status, out, err = run(capsys, "generate", "hello", *pair, "--stats")
    assert (status, out) == (0, text + "\n")
    assert "tokens/s" in err
    assert "acceptance length" in err
    assert run(capsys, "generate", "hello", *pair)[2] == ""


@pytest.mark.parametrize(
    "extra",
    [
        ["--system", "be brief"],
        ["--raw"],
        ["--temperature", "1.5", "--seed", "3"],
        ["--repetition-penalty", "2"],
        ["--max-new-tokens", "3"],
        ["--block-size", "2"],
        ["--max-context", "40"],
    ],
)
def test_options_take_effect(extra, pair, capsys):
    plain, changed = as_json(capsys, "hello", *pair), as_json(capsys, "hello", *pair, *extra)
    key = "rounds" if extra[0] == "--block-size" else "token_ids"
    if extra[0] == "--block-size":
        assert changed["token_ids"] == plain["token_ids"]
        assert len(changed["acceptance_by_position"]) == 1
    else:
        assert changed[key] != plain[key]


def test_a_seed_is_reported_and_reproduces(pair, capsys):
    first = as_json(capsys, "hello", *pair, "--temperature", "1")
    again = as_json(capsys, "hello", *pair, "--temperature", "1", "--seed", first["seed"])
    assert again["token_ids"] == first["token_ids"]


def test_stop_strings(pair, capsys):
    text = as_json(capsys, "hello", *pair, "--ignore-eos")["text"]
    stop = text[4:6]
    result = as_json(capsys, "hello", *pair, "--ignore-eos", "--stop", stop)
    assert result["text"] == text[: text.find(stop)]
    assert result["finish_reason"] == "stop"


def test_prompts_from_a_file_are_answered_in_order_and_in_turns(pair, capsys, tmp_path):
    rows = [
        {"prompt": "one"},
        {"turns": ["two", "and then?"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    status, out, _ = run(capsys, "generate", "--prompts", path, *pair, "--batch-size", "2")
    assert status == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [(answer["index"], answer["turn"]) for answer in answers] == [(0, 0), (1, 0), (2, 0), (1, 1)]
    single = as_json(capsys, "one", *pair)
    assert answers[0]["token_ids"] == single["token_ids"]
    assert answers[3]["prompt_tokens"] > answers[1]["prompt_tokens"] + answers[1]["new_tokens"]


def test_stdin_is_a_prompt(pair, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert as_json(capsys, "-", *pair)["token_ids"] == as_json(capsys, "hello", *pair)["token_ids"]


BAD = {
    "empty": ([""], "the prompt is empty"),
    "blank": (["  \n"], "the prompt is empty"),
    "no prompt": ([], "either a PROMPT or --prompts"),
    "both": (["x", "--prompts", "y.jsonl"], "either a PROMPT or --prompts"),
    "no file": (["--prompts", "nowhere.jsonl"], "cannot read prompts from nowhere.jsonl"),
    "too long": (["x" * 600], "leaves no room for an answer"),
    "context": (["hello", "--max-context", "9"], "raise --max-context"),
    "block size": (["x", "--block-size", "0"], "the block size is 0; it must be at least 1"),
    "denoising": (["x", "--denoising-steps", "9"], "denoising steps are 9; they must be from 1 to 5"),
    "denoising and a tree": (["x", "--denoising-steps", "2", "--tree", "8"], "it has no tree"),
    "temperature": (["x", "--temperature", "-1"], "temperature is -1.0"),
    "top-p": (["x", "--top-p", "0"], "top_p is 0.0"),
    "method": (["x", "--method", "magic"], "invalid choice: 'magic'"),
    "stop": (["x", "--stop", ""], "stop is"),
    "dtype": (["x", "--dtype", "int8"], "dtype 'int8' is unknown"),
    "half": (["x", "--dtype", "float16"], "not available on a CPU"),
    "device": (["x", "--device", "npu7"], "device"),
    "threads": (["x", "--threads", "0"], "0 is below 1"),
    "number": (["x", "--top-k", "many"], "invalid int value"),
    "drafter": (["x", "--drafter", "nowhere"], "there is no drafter folder nowhere"),
    "drafter for ar": (["x", "--method", "ar"], "--drafter has no effect with --method ar"),
    "batch": (["x", "--batch-size", "3"], "--batch-size needs --prompts"),
    "raw system": (["x", "--raw", "--system", "s"], "no system message"),
    "greedy rejection": (["x", "--acceptance", "rejection"], "rejection rule needs temperature"),
    "greedy top-k": (["x", "--top-k", "3"], "no effect at temperature 0"),
    "far too many threads": (["x", "--threads", "100000"], "--threads 100000 is far above"),
    "surrogate": (["x\udcff"], "no UTF-8 text"),
    "system surrogate": (["x", "--system", "\udcff"], "no UTF-8 text"),
    "empty drafter": (["x", "--drafter", ""], "the drafter's name is empty"),
    "empty target": (["x", "--target", ""], "the target's name is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_status_2(case, pair, capsys):
    arguments, message = BAD[case]
    try:
        status = main(["generate", *pair, *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("blockdraft: ")
    assert captured.err.count("\n") == 1


def test_another_target_needs_a_drafter(tiny_folder, capsys):
    status, out, err = run(capsys, "generate", "x", "--target", tiny_folder)
    assert (status, out) == (2, "")
    assert "no drafter ships for target" in err


def test_damaged_rows_name_their_line(pair, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for line, message in (
        ("{", "line 2: not valid JSON"),
        ('{"x": 1}', "line 2: a row needs"),
        ('{"prompt": ""}', "line 2: a row needs"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ('{"prompt": ' + "1" * 5001 + "}", "line 2: not valid JSON"),
        ('{"messages": [{"role": "\\ud800", "content": "a"}]}', "line 2: the prompt"),
        ('{"messages": [{"role": "user", "content": " "}]}', "line 2: a row needs"),
        ('{"prompt": "\\ud800"}', "line 2: the prompt '\\ud800' holds bytes"),
    ):
        path.write_text('{"prompt": "fine"}\n' + line)
        status, out, err = run(capsys, "generate", "--prompts", path, *pair)
        assert (status, out) == (2, "")
        assert message in err
    path.write_text("\n")
    assert run(capsys, "generate", "--prompts", path, *pair)[0] == 2


def test_a_wider_block_than_trained_warns_and_runs(pair, capsys):
    plain = as_json(capsys, "hello", *pair)
    status, out, err = run(capsys, "generate", "hello", *pair, "--block-size", "9", "--json")
    assert status == 0
    assert "above the 6" in err
    assert json.loads(out)["token_ids"] == plain["token_ids"]


def test_demo_shows_both_and_the_verdict(pair, capsys):
    status, out, _ = run(capsys, "demo", "hello", *pair)
    assert status == 0
    assert "autoregressive" in out
    assert "identical (" in out


def test_demo_explains_a_difference(pair, capsys, monkeypatch):
    import blockdraft.decoding.decode as module

    own = module.follow
    monkeypatch.setattr(
        module,
        "follow",
        lambda tokens, parents, choose: (lambda path, bonus: (path, (bonus + 1) % 260))(*own(tokens, parents, choose)),
    )
    status, out, _ = run(capsys, "demo", "hello", *pair)
    assert status == 1
    assert "not identical: they part at token 1" in " ".join(out.split())


def test_verify_proves_and_disproves(pair, capsys, monkeypatch):
    status, out, _ = run(capsys, "verify", *pair, "--limit", "3")
    assert status == 0
    assert out.startswith("LOSSLESS: 3 prompts (prompts of our own)")
    status, out, _ = run(capsys, "verify", *pair, "--limit", "2", "--temperature", "1", "--seed", "4", "--json")
    assert status == 0
    assert json.loads(out)["lossless"] is True
    bf16 = [*pair[:4], "--dtype", "bfloat16", "--max-new-tokens", "20"]
    status, out, _ = run(capsys, "verify", *bf16, "--limit", "2")
    assert status == 0
    assert "within epsilon" in out
    import blockdraft.decoding.decode as module

    own = module.follow
    monkeypatch.setattr(
        module,
        "follow",
        lambda tokens, parents, choose: (lambda path, bonus: (path, (bonus + 7) % 260))(*own(tokens, parents, choose)),
    )
    for options in (pair, bf16):
        status, out, _ = run(capsys, "verify", *options, "--limit", "2")
        assert status == 1
        assert out.startswith("NOT LOSSLESS")
        assert "FAILURE: prompt 0" in out


def test_verify_refuses_what_it_cannot_prove(pair, capsys):
    bf16 = [*pair[:4], "--dtype", "bfloat16"]
    for extra in (["--temperature", "1"], ["--repetition-penalty", "1.2"]):
        status, _, err = run(capsys, "verify", *bf16, *extra)
        assert status == 2
        assert "float32" in err
    assert run(capsys, "verify", *pair, "--temperature", "1", "--acceptance", "rejection")[0] == 2


def test_chat_keeps_both_caches(pair, capsys, monkeypatch):
    """T18: the second turn runs only its new tokens, and says what a fresh conversation would say."""
    from blockdraft.decoding.decode import Decoder

    kept = []
    own = Decoder._shared_prefix

    def shared(self, row, request):
        kept.append((own(self, row, request), len(request.prompt)))
        return kept[-1][0]

    monkeypatch.setattr(Decoder, "_shared_prefix", shared)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand more\n\n/reset\nhello\n/exit\n"))
    status, _, err = run(capsys, "chat", *pair, "--stats")
    assert status == 0
    assert err.count("acceptance length") == 3
    first, second, third = kept
    assert first[0] == 0
    assert second[0] >= first[1]
    assert third[0] == third[1] - 1  # the same prompt as the first: all but its last token is still there


def test_a_reused_prefix_changes_neither_output_nor_rounds(pair):
    """T18 in numbers: target and draft keys of the shared part are there."""
    from blockdraft.decoding.decode import Decoder
    from blockdraft.decoding.request import Request
    from blockdraft.rules.sampling import SamplingParams

    target = load_target(pair[1], dtype="float32")
    drafter = load_drafter(pair[3], target)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    prompts = [list(range(10, 40)), [*range(10, 30), 7, 8, 9], list(range(10, 40))]
    outcomes = []
    for reuse in (True, False):
        decoder = Decoder(target, drafter, 1, 80)
        before = target.forwards
        for prompt in prompts:
            request = Request(prompt, params, target)
            decoder.admit(request, reuse=reuse)
            while decoder.active:
                decoder.round()
            outcomes.append((request.output, request.rounds, request.accepted_at))
        assert target.forwards > before
    assert outcomes[:3] == outcomes[3:]


def test_interrupted_generation_ends_with_the_text_so_far(pair, tmp_path):
    """Ctrl-C: no traceback, status 130, whole text or JSON with what was said."""
    command = [sys.executable, "-c", SLOW, "generate", "hello", *pair, "--max-new-tokens", "400", "--ignore-eos"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    for _ in range(2):  # as text, then as JSON
        while (line := process.stderr.readline()) != "decoding\n":
            assert line and "Traceback" not in line
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err
    text, told, rest = out.split("status 130\n")
    assert text.endswith("\n") and rest == ""
    result = json.loads(told)
    assert result["finish_reason"] == "interrupted"
    assert 0 < result["new_tokens"] < 400


SLOW = """
import signal, sys, time
import blockdraft.decoding.decode as module
own = module.Decoder.round
def slow(self):
    if not hasattr(self, "told"):
        self.told = True
        print("decoding", file=sys.stderr)
    time.sleep(0.05)
    return own(self)
module.Decoder.round = slow
from blockdraft.cli.main import main
for extra in [], ["--json"]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    print("status", main([*sys.argv[1:], *extra]), flush=True)
"""


def test_a_closed_pipe_is_no_error(pair):
    command = f"{sys.executable} -m blockdraft generate hello {' '.join(pair)} --max-new-tokens 300 --ignore-eos | head -c 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_help_needs_no_torch():
    code = "import sys; from blockdraft.cli.main import parser; parser().format_help(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_python_names(pair):
    import blockdraft

    for name in blockdraft.__all__:
        assert getattr(blockdraft, name)
    with pytest.raises(AttributeError):
        blockdraft.nothing  # noqa: B018
    target = blockdraft.load_target(pair[1], dtype="float32")
    texts = [result.text for result in blockdraft.generate(target, ["a", "b"], None, blockdraft.SamplingParams(max_new_tokens=5))]
    assert "".join(blockdraft.stream(target, "a", None, blockdraft.SamplingParams(max_new_tokens=5))) == texts[0]
    with pytest.raises(UsageError, match="a block size needs a drafter"):
        blockdraft.generate(target, "a", block_size=4)


def test_rejection_with_nothing_to_reject_draws_from_the_target(pair, capsys):
    result = as_json(capsys, "hello", *pair, "--temperature", "1", "--seed", "3", "--acceptance", "rejection", "--block-size", "1")
    assert result["rounds"] == result["plain_rounds"] == result["new_tokens"] - 1 > 0


def test_rejection_without_a_drafter_is_refused(pair, capsys):
    options = [*pair[:2], *pair[4:], "--method", "ar", "--temperature", "1", "--acceptance", "rejection"]
    status, out, err = run(capsys, "generate", "x", *options)
    assert (status, out) == (2, "")
    assert "--acceptance has no effect with --method ar" in err


def test_a_greedy_seed_is_called_out(pair, capsys):
    status, _, err = run(capsys, "generate", "x", *pair, "--seed", "1")
    assert status == 0
    assert "--seed has no effect at temperature 0" in err


def test_demo_takes_any_text_as_text(pair, capsys):
    status, out, _ = run(capsys, "demo", "Is [/b] or [red]x[/red] a tag?", *pair)
    assert status == 0
    assert "Is [/b] or [red]x[/red] a tag?" in out


def test_line_separators_inside_a_text_part_no_rows(pair, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\ufeff" + json.dumps({"prompt": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    status, out, _ = run(capsys, "generate", "--prompts", path, *pair)
    assert status == 0
    assert len(out.split("\n")) == 2


def test_a_later_turn_that_is_too_long_ends_its_row_alone(pair, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ok"}\n' + json.dumps({"turns": ["a", "b" * 600, "c"]}) + '\n{"turns": ["d", "e"]}\n')
    status, out, err = run(capsys, "generate", "--prompts", path, *pair)
    assert status == 1
    assert [(r["index"], r["turn"]) for r in map(json.loads, out.splitlines())] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert "row 1 of" in err
    assert "turn 1: the prompt has" in err
    path.write_text(json.dumps({"prompt": "b" * 600}))
    status, out, err = run(capsys, "generate", "--prompts", path, *pair)
    assert (status, out) == (2, "")
    assert "row 0 of" in err


def test_two_system_messages_are_refused(pair, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}))
    status, _, err = run(capsys, "generate", "--prompts", path, *pair, "--system", "t")
    assert status == 2
    assert "system message of their own" in err


def test_a_template_that_refuses_is_one_sentence(pair, capsys, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    def refuse(self, *args, **kwargs):
        from jinja2 import TemplateError

        raise TemplateError("System role not supported")

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", refuse)
    status, out, err = run(capsys, "generate", "x", *pair)
    assert (status, out) == (2, "")
    assert "refuses these messages: System role not supported" in err


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "2>&-", "| cat >/dev/full"])
def test_output_that_cannot_be_written(redirect, pair):
    command = f"PYTHONIOENCODING=ascii {sys.executable} -m blockdraft generate hello {' '.join(pair)} {redirect}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr
    assert "defect" not in result.stderr


@pytest.mark.parametrize("where", ["observe", "prefill"])
def test_after_an_interrupt_a_conversation_goes_on_as_if_fresh(where, pair, monkeypatch):
    """Ctrl-C between the target's commit and the drafter's, or in the middle of a long prompt: nothing stale is reused."""
    from blockdraft.decoding.decode import Decoder
    from blockdraft.decoding.request import Request
    from blockdraft.rules.sampling import SamplingParams

    monkeypatch.setattr("blockdraft.targets.target.PREFILL_CHUNK", 16)
    target = load_target(pair[1], dtype="float32")
    drafter = load_drafter(pair[3], target)
    first, second = list(range(10, 40)), list(range(60, 110))

    def answer(decoder, prompt):
        request = Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), target)
        decoder.admit(request, reuse=True)
        while decoder.active:
            decoder.round()
        return request.output

    expected = answer(Decoder(target, drafter, 1, 160), first)
    decoder = Decoder(target, drafter, 1, 160)
    assert answer(decoder, first) == expected
    own, calls = drafter.observe, []

    def observe(*args):
        calls.append(1)
        if len(calls) == (3 if where == "prefill" else 6):  # the prompt has four chunks
            raise KeyboardInterrupt
        own(*args)

    drafter.observe = observe
    with pytest.raises(KeyboardInterrupt):
        answer(decoder, second)
    drafter.observe = own
    decoder.abandon()
    assert answer(decoder, first) == expected


def test_interrupted_files_keep_what_was_said(pair, capsys, tmp_path, monkeypatch):
    from blockdraft.decoding.decode import Decoder

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    own, calls = Decoder.round, []

    def round(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return own(self)

    monkeypatch.setattr(Decoder, "round", round)
    status, out, _ = run(capsys, "generate", "--prompts", path, *pair)
    assert status == 130
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["interrupted"] * 2
    assert all(row["new_tokens"] >= 4 for row in rows)
