"""Making a corpus: nothing finished is lost, nothing is asked twice, and the answers are the target's own."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from blockdraft.cli.main import main
from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.errors import UsageError
from blockdraft.load import load_target
from blockdraft.prompts import encode
from blockdraft.rules.sampling import Sampler, SamplingParams
from blockdraft.training.data import corpus as module
from blockdraft.training.data.answering import Answering, Question, Tally, message_fault
from blockdraft.training.data.corpus import Corpus, Row, identity, written_key
from blockdraft.training.data.exchange import export_answers, read_answers
from blockdraft.training.data.questions import given_questions, normalised
from blockdraft.training.data.synthesis import OPENINGS, loop_share, loops, message_text, opening_of, user_frame
from tests import tiny

WHO = {"target": "t", "template_sha256": "1"}


def row(number: int, source: str = "code") -> Row:
    return Row(f"k{number}", source, [1, number], list(range(number, number + 5)), number % 2 == 0)


@pytest.fixture(scope="module")
def speaking(tiny_folder):
    return load_target(tiny_folder, dtype="float32")


def test_rows_survive_a_kill_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 4)
    corpus = Corpus(tmp_path, WHO)
    for number in range(10):
        corpus.add(row(number))
    with (tmp_path / "pending.jsonl").open("a") as journal:
        journal.write('{"key": "k99", "sour')  # cut by the kill
    del corpus  # a killed process holds no lock
    again = Corpus(tmp_path, WHO)
    assert list(again.rows()) == [row(number) for number in range(10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "answers-00000.safetensors",
        "answers-00001.safetensors",
        "corpus.json",
        "pending.jsonl",
    ]
    again.add(row(10))
    assert list(Corpus(tmp_path).rows()) == [row(number) for number in range(11)]  # the cut line swallowed nothing
    again.seal()
    last = Corpus(tmp_path)
    assert list(last.rows()) == [row(number) for number in range(11)]
    assert last.counts == {"code": 11}
    assert last.tokens == {"code": 55}


def test_a_kill_between_shard_and_journal_repeats_no_row(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, WHO)
    for number in range(3):
        corpus.add(row(number))
    journal = (tmp_path / "pending.jsonl").read_text()
    corpus.seal()
    (tmp_path / "pending.jsonl").write_text(journal)
    del corpus
    again = Corpus(tmp_path, WHO)
    assert [r.key for r in again.rows()] == ["k0", "k1", "k2"]
    again.add(row(3))
    again.seal()
    assert [r.key for r in Corpus(tmp_path).rows()] == ["k0", "k1", "k2", "k3"]


def test_another_target_is_refused_and_what_differs_is_named(tmp_path):
    corpus = Corpus(tmp_path, WHO)
    Corpus(tmp_path / "empty", WHO)
    Corpus(tmp_path / "empty", {**WHO, "template_sha256": "2"})  # nothing is there yet that would be another's
    corpus.add(row(0))
    with pytest.raises(UsageError, match="template_sha256 '1' instead of '2'"):
        Corpus(tmp_path, {**WHO, "template_sha256": "2"})
    with pytest.raises(UsageError, match=r"has no corpus\.json"):
        Corpus(tmp_path / "nowhere")


def test_licences_survive_a_kill(tmp_path):
    corpus = Corpus(tmp_path, WHO)
    corpus.add(row(0), "MIT")
    corpus.add(row(1, "talk"), "CC-BY-4.0")
    corpus.add(row(2), "Apache-2.0")
    del corpus
    assert Corpus(tmp_path).licences == {"code": {"MIT", "Apache-2.0"}, "talk": {"CC-BY-4.0"}}


def test_a_damaged_shard_is_named(tmp_path):
    corpus = Corpus(tmp_path, WHO)
    corpus.add(row(0))
    corpus.seal()
    (tmp_path / "answers-00000.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"answers-00000\.safetensors is damaged"):
        Corpus(tmp_path)


def test_a_deleted_shard_is_made_up_for(tmp_path):
    """What the message about a damaged one advises: the others are still read, and new rows find a new place."""
    corpus = Corpus(tmp_path, WHO)
    for number in range(3):
        corpus.add(row(number))
        corpus.seal()
    del corpus
    (tmp_path / "answers-00001.safetensors").unlink()
    again = Corpus(tmp_path, WHO)
    assert [r.key for r in again.rows()] == ["k0", "k2"]
    again.add(row(1))
    again.seal()
    assert [r.key for r in Corpus(tmp_path).rows()] == ["k0", "k2", "k1"]


def test_identity_tells_targets_templates_and_sampling_apart(speaking):
    who = identity(speaking, temperature=0.0)
    assert who == identity(speaking, temperature=0.0)
    assert who != identity(speaking, temperature=1.0)
    own = speaking.tokenizer.chat_template
    speaking.tokenizer.chat_template = own + " "
    try:
        assert who["template_sha256"] != identity(speaking)["template_sha256"]
    finally:
        speaking.tokenizer.chat_template = own


def test_answers_are_the_targets_own(tmp_path, speaking):
    """Few slots, many questions of unequal length: each answer is what the target says to that prompt alone."""
    params = SamplingParams(max_new_tokens=12)
    questions = [Question(f"q{i}", "code", [5 + i] * (1 + i % 4) + [9, 40 + i]) for i in range(11)]
    corpus, tally = Corpus(tmp_path, WHO), Tally()
    list(Answering(speaking, corpus, params, 64, 3, tally).given(iter(questions)))
    rows = {r.key: r for r in corpus.rows()}
    assert tally.answers == len(rows) == 11
    for question in questions:
        request = Request(question.prompt, params, speaking)
        list(decode(speaking, None, [request]))
        stored = rows[question.key]
        assert (stored.prompt, stored.answer) == (question.prompt, request.output)
        assert stored.finished == (request.finish_reason == "stop")
    before = tally.token_steps
    list(Answering(speaking, corpus, params, 64, 3, tally).given(iter(questions)))
    assert tally.token_steps == before  # nothing is asked twice
    assert "tokens/s" in tally.summary()


def test_prompts_that_leave_no_room_are_counted(tmp_path, speaking):
    tally = Tally()
    questions = iter([Question("q", "s", [5] * 60)])
    list(Answering(speaking, Corpus(tmp_path, WHO), SamplingParams(), 64, 2, tally).given(questions))
    assert tally.dropped == {"prompts too long": 1}


def test_the_header_ends_where_the_user_begins(speaking):
    header, tail = user_frame(speaking)
    assert speaking.tokenizer.decode(header) == "<|user|>"
    assert speaking.tokenizer.decode(tail) == "<|end|><|assistant|>"
    assert message_text(speaking, (header, tail), encode(speaking, "the sea")) == "the sea"


def test_without_a_chat_template_nobody_can_be_the_user(speaking, monkeypatch):
    monkeypatch.setattr(speaking.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="has no chat template"):
        user_frame(speaking)


def test_messages_are_written_steered_told_apart_and_answered(speaking, monkeypatch, tmp_path):
    """The target's choices replaced by a script: kinds in turn, openings kept, duplicates and oddities dropped."""
    words = speaking.tokenizer("tell me about the sea", add_special_tokens=False)["input_ids"]
    header = len(user_frame(speaking)[0])

    def opening_length(number):
        opening = opening_of(["code", "mathematics"], 0, number)[1]
        return len(speaking.tokenizer(opening, add_special_tokens=False)["input_ids"])

    def say(sampler, logits, prefix):
        own = words if sampler.row % 5 == 0 else [*words, 50 + sampler.row]
        at = len(prefix) - header - opening_length(sampler.row)
        return own[at] if at < len(own) else 2

    monkeypatch.setattr(Sampler, "plain_greedy", property(lambda self: False))
    monkeypatch.setattr(Sampler, "choose", say)

    def written(folder, before=()):
        corpus, tally = Corpus(folder, identity(speaking)), Tally()
        for row in before:
            corpus.add(row)
        answering = Answering(speaking, corpus, SamplingParams(max_new_tokens=8), 300, 4, tally)
        list(answering.written(["code", "mathematics"], range(40), 0))
        return {row.key: row for row in corpus.rows()}, tally

    old = Row(written_key(0, 3), "code", [5, 6], [7], True)
    made, tally = written(tmp_path / "one", [old])
    assert made.pop(old.key) == old
    assert len(made) + sum(tally.dropped.values()) == 39
    assert len(made) == tally.answers > 8
    for key, row in made.items():
        kind, opening = opening_of(["code", "mathematics"], 0, int(key.rpartition("/")[2]))
        assert row.source == kind
        assert ("<|user|>" + opening).strip() in speaking.tokenizer.decode(row.prompt)
    texts = [speaking.tokenizer.decode(row.prompt) for row in made.values()]
    assert len(set(texts)) == len(texts)
    again, tally = written(tmp_path / "two", made.values())
    assert again.keys() - made.keys() == {old.key}  # all others are known, or oddities as before
    assert tally.answers == 1


def test_openings_cover_the_kinds_evenly():
    kinds = list(OPENINGS)
    counts = {kind: sum(opening_of(kinds, 0, n)[0] == kind for n in range(4000)) for kind in kinds}
    assert all(0.18 < counts[kind] / 4000 < 0.41 for kind in kinds)
    assert opening_of(kinds, 0, 5) == opening_of(kinds, 0, 5)


@pytest.mark.parametrize(
    ("ids", "text", "ended", "fault"),
    [
        ([5, 6, 7, 8, 9], "x", True, None),
        ([5, 6, 7, 8, 9], "x", False, "messages without an end"),
        ([5, 6], "x", True, "messages too short"),
        ([5, 6, 7, 8, 9], "", True, "messages too short"),
        ([5, 6] * 30, "x", True, "messages that loop"),
        ([5, 6, 7, 8, 9], "seen", True, "messages written before"),
    ],
)
def test_faults_of_messages(ids, text, ended, fault):
    assert message_fault(ids, text, ended, {"seen"}) == fault


def test_two_writers_are_refused(tmp_path):
    corpus = Corpus(tmp_path, WHO)
    corpus.add(row(0))
    with pytest.raises(UsageError, match="another run is writing to"):
        Corpus(tmp_path, WHO)
    assert Corpus(tmp_path).keys == {"k0"}  # readers are welcome
    del corpus
    Corpus(tmp_path, WHO)


def test_an_answer_ends_where_it_has_begun_to_loop(tmp_path, speaking, monkeypatch):
    """It is cut, kept and counted, and its slot is free for the next question."""
    monkeypatch.setattr(Sampler, "plain_greedy", False)
    monkeypatch.setattr(Sampler, "choose", lambda self, logits, prefix: 10 + len(prefix) % 3)
    corpus, tally = Corpus(tmp_path, WHO), Tally()
    params = SamplingParams(max_new_tokens=200)
    list(Answering(speaking, corpus, params, 300, 2, tally).given(iter([Question("a", "code", [5, 6])])))
    (kept,) = corpus.rows()
    assert (len(kept.answer), kept.finished, tally.looped) == (64, False, 1)
    assert "1 cut at a loop" in tally.summary()


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        (list(range(300)), False),
        ([7] * 49, True),
        ([7] * 48, False),
        (list(range(90)) * 3, True),
        (list(range(90)) * 2, False),
        ([*range(60), *[1, 2, 3] * 17], True),
        ([*[1, 2, 3] * 17, 9], False),
        ([], False),
    ],
)
def test_what_a_loop_is(ids, looping):
    assert loops(ids) == looping


def test_loop_share():
    assert loop_share(list(range(50))) == 0
    assert loop_share([1, 2, 3] * 30) > 0.9
    assert loop_share([]) == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Hello,  World!", "hello world", True),
        ("Say \u201cyes\u201d.", 'say "yes"', True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3.5 + 1?", "What is 35 + 1?", False),
        ("Sort [1, -2]", "Sort [1, 2]", False),
        ("if a < b", "if a > b", False),
    ],
)
def test_what_near_duplicates_share(one, other, same):
    assert (normalised(one) == normalised(other)) == same


def test_what_cannot_be_asked_is_counted_and_the_rest_is_asked(tmp_path, tiny_folder, speaking, monkeypatch, capsys):
    """A template that refuses one conversation does not end the run; a question that is there already is not asked again."""
    rows = [{"prompt": text} for text in ("Hello", "forbidden", "hello!", "What now")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target = load_target(tiny_folder, dtype="float32")
    refusing = "{% if messages[0]['content'] == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    target.tokenizer.chat_template = refusing + target.tokenizer.chat_template
    monkeypatch.setattr("blockdraft.cli.options.load_target", lambda args: target)
    assert ask(tmp_path / "c", tiny_folder, "--prompts", str(tmp_path / "p.jsonl"), "--export", str(tmp_path / "a.gz")) == 0
    assert "dropped: 1 near-duplicates, 1 refused by the template" in capsys.readouterr().err
    assert len(Corpus(tmp_path / "c").keys) == 2
    arguments = ["--prompts", str(tmp_path / "p.jsonl"), "--answers", str(tmp_path / "a.gz")]
    assert ask(tmp_path / "d", tiny_folder, *arguments) == 0
    assert "2 answers taken in" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["TEXTS", "ANSWERS"])
def test_a_refused_command_leaves_the_folder_to_others(place, tmp_path, tiny_folder, capsys):
    (tmp_path / "TEXTS").mkdir()
    (tmp_path / "ANSWERS").write_text("no gzip")
    assert ask(tmp_path / "c", tiny_folder, {"TEXTS": "--text", "ANSWERS": "--answers"}[place], str(tmp_path / place)) == 2
    assert not (tmp_path / "c" / "corpus.json").exists()
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    assert ask(tmp_path / "c", tiny_folder, "--prompts", str(tmp_path / "p.jsonl"), "--temperature", "1") == 0
    assert len(Corpus(tmp_path / "c").keys) == 1


def test_conversations_are_as_long_as_they_are_asked_to_be(tmp_path, tiny_folder, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    arguments = ["--prompts", str(tmp_path / "p.jsonl"), "--context", "100", "--max-new-tokens"]
    assert ask(tmp_path / "c", tiny_folder, *arguments, "99") == 0
    corpus = Corpus(tmp_path / "c")
    assert corpus.identity["context"] == 100
    assert all(len(r.prompt) + len(r.answer) <= 100 for r in corpus.rows())
    assert ask(tmp_path / "d", tiny_folder, *arguments, "100") == 2
    assert "--max-new-tokens 100 leaves no room for a prompt in a --context of 100 tokens" in capsys.readouterr().err
    assert ask(tmp_path / "d", tiny_folder, *arguments[:2], "--context", "9999") == 2
    assert "reads 512 tokens; lower it" in capsys.readouterr().err


def test_known_texts_come_from_the_corpus(tmp_path, speaking):
    from blockdraft.prompts import encode

    said = message_text(speaking, user_frame(speaking), encode(speaking, "How do I sort?"))
    assert normalised(said) == normalised("how do I   sort") == "how do i sort"


def test_the_command_goes_on_where_it_was(tmp_path, tiny_folder, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"source": s, "prompt": f"{s} {i}"}) for s in ("a", "b") for i in range(4)))
    out = tmp_path / "corpus"
    command = ["data", str(out), "--target", str(tiny_folder), "--dtype", "float32", "--max-new-tokens", "8", "--slots", "3"]
    assert main([*command, "--prompts", str(prompts), "--plan"]) == 0
    assert not out.exists()
    assert "8 given prompts" in capsys.readouterr().out
    assert main([*command, "--prompts", str(prompts), "--per-source", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert all(count <= 2 for count in first["rows"].values())
    assert main([*command, "--prompts", str(prompts), "--self-synthesize", "4", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert sum(second["rows"].values()) > sum(first["rows"].values())
    keys = [r.key for r in Corpus(out).rows()]
    assert len(keys) == len(set(keys)) == sum(second["rows"].values())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "nothing to ask"),
        (["--self-synthesize", "3", "--kinds", "poetry"], "kind 'poetry' is unknown"),
        (["--self-synthesize", "0"], "0 is below 1"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompts"),
    ],
)
def test_bad_input_is_one_sentence(extra, message, tmp_path, tiny_folder, capsys):
    try:
        status = main(["data", str(tmp_path / "out"), "--target", str(tiny_folder), *extra])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- where questions and answers come from


def test_given_questions_of_files_and_datasets(tmp_path):
    rows = [
        {"prompt": "Hi", "source": "a", "license": "MIT"},
        {"turns": ["One", "Two"]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"prompt": "Hi"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = {q.key: q for q in given_questions([str(tmp_path / "p.jsonl")], None, 0)}
    assert len(found) == 3  # the same message twice is one question
    assert all(message["role"] != "assistant" for q in found.values() for message in q.messages)  # nobody else's answer
    assert {q.source for q in found.values()} == {"a", "p"} or {q.source for q in found.values()} == {"p"}
    folder = tmp_path / "dataset"
    folder.mkdir()
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}, {"from": "human", "value": "And?"}]
    (folder / "train.jsonl").write_text(json.dumps({"conversations": talk}) + "\n")
    (question,) = given_questions([str(folder)], None, 0)
    assert question.messages == [{"role": "user", "content": "Why?"}]
    (folder / "train.jsonl").write_text(json.dumps({"instruction": "Sum", "input": "1 2"}) + "\n")
    assert given_questions([str(folder)], None, 0)[0].messages[0]["content"] == "Sum\n\n1 2"
    (folder / "train.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(UsageError, match="has columns body; it needs prompt"):
        given_questions([str(folder)], None, 0)
    with pytest.raises(UsageError, match="neither a file nor a dataset"):
        given_questions([str(tmp_path / "nothing-here")], None, 0)
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "A"}]}))
    assert given_questions([str(tmp_path / "talks.jsonl")], None, 0) == []


def test_per_source_limits_each_source(tmp_path):
    rows = [{"prompt": f"{source} {i}", "source": source} for source in "ab" for i in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept = given_questions([str(tmp_path / "p.jsonl")], 4, 0)
    assert sorted(q.source for q in kept) == ["a"] * 4 + ["b"] * 4
    assert kept == given_questions([str(tmp_path / "p.jsonl")], 4, 0) != given_questions([str(tmp_path / "p.jsonl")], 4, 1)


def ask(tmp_path, tiny_folder, *arguments):
    return main(["data", str(tmp_path), "--target", str(tiny_folder), "--dtype", "float32", "--max-new-tokens", "12", *arguments])


def test_answers_travel_in_one_compact_file(tmp_path, tiny_folder, capsys):
    """Given prompts by their digest, self-written ones by their text: another corpus takes them in, row for row."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text, "source": "s"}) for text in ("Hello there", "What now")))
    file = tmp_path / "answers.jsonl.gz"
    assert ask(tmp_path / "one", tiny_folder, "--prompts", str(prompts), "--export", str(file)) == 0
    content = gzip.decompress(file.read_bytes()).decode()
    assert "Hello" not in content
    assert ask(tmp_path / "two", tiny_folder, "--prompts", str(prompts), "--answers", str(file), "--json") == 0
    printed = capsys.readouterr()
    assert "2 answers taken in, 0 to prompts" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["rows"] == {"s": 2}
    assert list(Corpus(tmp_path / "one").rows()) == list(Corpus(tmp_path / "two").rows())
    assert ask(tmp_path / "three", tiny_folder, "--answers", str(file)) == 0
    assert "0 answers taken in, 2 to prompts that --prompts does not hold" in capsys.readouterr().err
    another = tiny.save_folder(tmp_path / "another", seed=5)
    assert ask(tmp_path / "four", another, "--answers", str(file)) == 2
    assert "with weights_sha256" in capsys.readouterr().err
    assert ask(tmp_path / "warm", tiny_folder, "--answers", str(file), "--temperature", "1") == 2
    assert "with temperature 0.0, the corpus has 1.0" in capsys.readouterr().err
    file.write_bytes(gzip.compress(b'{"prompt_ids": [5], "response_ids": [99999]}\n'))
    assert ask(tmp_path / "five", tiny_folder, "--answers", str(file)) == 2
    assert "line 1: no row of answers (ValueError: token ids outside of the vocabulary)" in capsys.readouterr().err


def test_self_written_prompts_travel_as_text(tmp_path, speaking):
    corpus = Corpus(tmp_path / "c", identity(speaking))
    prompt = encode(speaking, "tell me about the sea")
    odd = [*prompt[:-1], 9]
    for key, ids in (("written/0/1", prompt), ("written/0/2", odd)):
        corpus.add(Row(key, "code", ids, [7, 8, 9], False))
    export_answers(corpus, speaking, tmp_path / "a.gz")
    content = gzip.decompress((tmp_path / "a.gz").read_bytes()).decode()
    assert "tell me about the sea" in content
    assert [found[0] for found in read_answers(tmp_path / "a.gz", speaking, [], corpus.identity)] == list(corpus.rows())


def test_licences_travel_with_the_answers(tmp_path, speaking):
    """A prompt that nobody gave and the target did not write has the licence that its file knows, or none that is known."""
    corpus = Corpus(tmp_path / "c", identity(speaking))
    prompt = encode(speaking, "tell me about the sea")
    corpus.add(Row("written/0/1", "code", prompt, [7, 8], False))
    corpus.add(Row("text/1", "text", prompt, [7, 9], False), "MIT")
    export_answers(corpus, speaking, tmp_path / "a.gz")
    found = {r.source: licence for r, licence in read_answers(tmp_path / "a.gz", speaking, [], corpus.identity)}
    assert found == {"code": "the target's", "text": "MIT"}
    (tmp_path / "b.gz").write_bytes(gzip.compress(b'{"prompt_ids": [5], "response_ids": [9]}\n'))
    assert [licence for _, licence in read_answers(tmp_path / "b.gz", speaking, [], corpus.identity)] == ["unknown"]


def test_text_is_cut_into_rows(tmp_path, tiny_folder):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("some words to read " * 60)
    (folder / "b.txt").write_text("short")
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00\x80")
    assert ask(tmp_path / "c", tiny_folder, "--text", str(folder)) == 0
    rows = list(Corpus(tmp_path / "c").rows())
    assert {row.source for row in rows} == {"text"}
    target = load_target(tiny_folder, dtype="float32")
    text = target.tokenizer("some words to read " * 60, add_special_tokens=False)["input_ids"]
    assert [token for row in rows for token in (*row.prompt, *row.answer)] == text[
        : sum(len(r.prompt) + len(r.answer) for r in rows)
    ]
    assert len(text) - sum(len(r.prompt) + len(r.answer) for r in rows) < 32


def test_thinking_mode_needs_a_template_that_knows_it(tmp_path, tiny_folder, capsys, speaking):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')
    assert ask(tmp_path / "c", tiny_folder, "--prompts", str(prompts), "--thinking", "on") == 2
    assert "knows no thinking mode" in capsys.readouterr().err
    own = speaking.tokenizer.chat_template
    speaking.tokenizer.chat_template = own + "{% if enable_thinking %}<|system|>{% endif %}"
    try:
        assert encode(speaking, "Hi", thinking=True) != encode(speaking, "Hi", thinking=False) == encode(speaking, "Hi")
    finally:
        speaking.tokenizer.chat_template = own


class Server(BaseHTTPRequestHandler):
    """A chat completions server that is busy at first, and refuses what it does not know."""

    asked: ClassVar[list] = []
    busy: ClassVar[int] = 2
    ids: ClassVar[bool] = False
    picky: ClassVar[int] = 0
    odd: ClassVar[object] = None

    def do_GET(self):
        self.reply(200, {"data": [{"id": "the-model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).busy:
            type(self).busy -= 1
            return self.reply(503, {})
        if "return_token_ids" in body and not self.ids:
            return self.reply(400, {"error": "unknown field"})
        if body["messages"][0]["content"] == "Question 3" and self.picky:
            return self.reply(self.picky, {"error": "no"})
        type(self).asked.append(body)
        choice = {"finish_reason": "stop", "message": {"content": "a calm sea"}}
        if self.ids:
            choice["token_ids"] = [9, 8, 2]
        if self.odd is not None:
            return self.reply(200, self.odd)
        return self.reply(200, {"choices": [choice]})

    def reply(self, status, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("ids", [False, True])
def test_answers_of_a_server(ids, tmp_path, tiny_folder, monkeypatch, capsys):
    from blockdraft.training.data import endpoint

    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    Server.asked, Server.busy, Server.ids, Server.picky = [], 2, ids, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Question {i}"}) for i in range(7)))
    arguments = ["--prompts", str(prompts), "--endpoint", f"http://127.0.0.1:{server.server_port}/v1", "--slots", "3"]
    try:
        assert ask(tmp_path / "c", tiny_folder, *arguments) == 0
        assert {body["model"] for body in Server.asked} == {"the-model"}
        assert len(Server.asked) == 7
        rows = list(Corpus(tmp_path / "c").rows())
        target = load_target(tiny_folder, dtype="float32")
        text = [*target.tokenizer("a calm sea", add_special_tokens=False)["input_ids"], target.tokenizer.eos_token_id]
        assert all(row.answer == ([9, 8, 2] if ids else text) and row.finished for row in rows)
        assert {tuple(row.prompt) for row in rows} == {tuple(encode(target, f"Question {i}")) for i in range(7)}
        assert ask(tmp_path / "c", tiny_folder, *arguments) == 0
        assert len(Server.asked) == 7  # nothing is asked twice
        capsys.readouterr()
        Server.picky = 400
        assert ask(tmp_path / "refused", tiny_folder, *arguments) == 0
        assert "1 refused by the server" in capsys.readouterr().err
        Server.picky = 401
        assert ask(tmp_path / "stranger", tiny_folder, *arguments) == 2
        assert "refuses with status 401" in capsys.readouterr().err
        Server.picky = 500
        assert ask(tmp_path / "broken", tiny_folder, *arguments) == 1
        assert "did not answer in 6 tries: status 500" in capsys.readouterr().err
        assert len(Corpus(tmp_path / "broken").keys) > 0  # what came before is kept
    finally:
        server.shutdown()
        server.server_close()
    capsys.readouterr()
    assert ask(tmp_path / "d", tiny_folder, *arguments) == 1
    assert "did not answer in 6 tries" in capsys.readouterr().err


LOOPING = [5, 6, *[7, 8, 9] * 40, 2]


@pytest.mark.parametrize(
    ("odd", "status", "sentence"),
    [
        (b"<html>", 2, "does not answer with a JSON object ('<html>')"),
        ([1], 2, "does not answer with a JSON object"),
        ({"choices": []}, 2, "answers without choices"),
        ({"choices": [{"finish_reason": "stop", "token_ids": LOOPING}]}, 0, "1 answers (1 cut at a loop)"),
    ],
)
def test_odd_answers_of_a_server(odd, status, sentence, tmp_path, tiny_folder, monkeypatch, capsys):
    Server.asked, Server.busy, Server.ids, Server.picky = [], 0, True, 0
    monkeypatch.setattr(Server, "odd", odd)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    arguments = ["--prompts", str(tmp_path / "p.jsonl"), "--endpoint", f"http://127.0.0.1:{server.server_port}/v1"]
    try:
        assert ask(tmp_path / "c", tiny_folder, *arguments) == status
    finally:
        server.shutdown()
        server.server_close()
    assert sentence in capsys.readouterr().err
    if status == 0:
        (kept,) = Corpus(tmp_path / "c").rows()
        assert (kept.answer, kept.finished) == (LOOPING[:64], False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to ask"),
        (["--kinds", "poetry", "--self-synthesize", "3"], "kind 'poetry' is unknown"),
        (["--endpoint", "http://127.0.0.1:1/v1", "--self-synthesize", "3"], "leave --endpoint out"),
        (["--endpoint-model", "m", "--prompts", "p"], "--endpoint-model has no effect"),
        (["--endpoint", "nowhere", "--prompts", "PROMPTS"], "'nowhere' is no address of a server"),
        (["--text", "TEXTS"], "holds no UTF-8 text"),
        (["--prompts", "PROMPTS", "--kinds", "code"], "--kinds has no effect without --self-synthesize"),
        (["--self-synthesize", "3", "--per-source", "3"], "--per-source has no effect without --prompts"),
        (["--text", "TEXTS", "--endpoint", "http://127.0.0.1:1/v1"], "--endpoint has nothing to ask"),
        (["--export", "a.gz"], "to export; name the folder"),
        (["--answers", "nowhere.gz"], "there is no file nowhere.gz for --answers"),
    ],
)
def test_options_that_cannot_take_effect(arguments, sentence, tmp_path, tiny_folder, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "texts").mkdir()
    places = {"PROMPTS": str(tmp_path / "p.jsonl"), "TEXTS": str(tmp_path / "texts")}
    assert ask(tmp_path / "c", tiny_folder, *[places.get(a, a) for a in arguments]) == 2
    assert sentence in capsys.readouterr().err
