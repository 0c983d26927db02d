"""Streaming text: pieces add up, no half characters, stop strings end at the token that completes them (T6)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.decoding.text import Detokenizer, StopStrings
from blockdraft.errors import UsageError
from blockdraft.rules.sampling import SamplingParams
from tests import tiny
from tests.doubles import Scripted, knowing


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@given(st.text(max_size=20))
@settings(max_examples=80, deadline=None)
def test_pieces_add_up_and_are_whole_characters(text):
    tokenizer = _tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(4, 258), max_size=16))
@settings(max_examples=80, deadline=None)
def test_any_ids_add_up_to_their_decoding(ids):
    """Random bytes, mostly broken characters."""
    tokenizer = _tokenizer()
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == detokenizer.text
    assert text == tokenizer.decode(ids)


_made = []


def _tokenizer():
    if not _made:
        import tempfile
        from pathlib import Path

        folder = tempfile.mkdtemp()
        _made.append(AutoTokenizer.from_pretrained(tiny.save_folder(Path(folder))))
    return _made[0]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_brute_force(text, stops):
    strings = StopStrings(stops)
    for end in range(len(text) + 1):
        part = text[:end]
        begins = [part.find(stop) for stop in stops if stop in part]
        assert strings.find(part) == (min(begins) if begins else None)
        safe = strings.safe(part)
        if not begins:
            held = max((n for n in range(1, end + 1) if any(s.startswith(part[-n:]) and n < len(s) for s in stops)), default=0)
            assert safe == end - held


class Voice:
    """A target that says a fixed text: the real loop, with the choice replaced by the script."""

    def __init__(self, target, tokenizer, text, tail=(2,)):
        self.ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *tail]
        self.target, self.prompt = target, [5, 6, 7]

    def say(self, monkeypatch, block_size=None, guess=None, **params):
        from blockdraft.rules.sampling import Sampler

        ids = [*self.ids, *[9] * 80]
        monkeypatch.setattr(Sampler, "plain_greedy", property(lambda self: False))
        monkeypatch.setattr(Sampler, "choose", lambda sampler, logits, prefix: ids[len(prefix) - 3])
        drafter = guess or knowing({tuple(self.prompt): ids}, vocabulary=10**6)
        request = Request(self.prompt, SamplingParams(**{"max_new_tokens": 60, **params}), self.target)
        pieces = []
        for _ in decode(self.target, drafter, [request], block_size=block_size):
            pieces.append(request.take_text())
        assert "".join(pieces) == request.text
        return request


@pytest.fixture(scope="module")
def speaking(tiny_folder):
    from blockdraft.load import load_target

    return load_target(tiny_folder, dtype="float32")


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("at", range(12))
def test_the_end_token_at_every_slot(at, block_size, speaking, tokenizer, monkeypatch):
    """T6: wherever the end token falls inside a block, it is the last token; nothing behind it leaks."""
    voice = Voice(speaking, tokenizer, "x" * at)
    request = voice.say(monkeypatch, block_size)
    assert request.output == voice.ids
    assert (request.text, request.finish_reason) == ("x" * at, "stop")


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("prefix", range(9))
def test_a_stop_string_wherever_the_rounds_part_it(prefix, block_size, speaking, tokenizer, monkeypatch):
    voice = Voice(speaking, tokenizer, "a" * prefix + "STOPPER and more")
    request = voice.say(monkeypatch, block_size, stop=("OPP", "zzz"))
    assert request.text == "a" * prefix + "ST"
    assert request.finish_reason == "stop"
    assert request.output == voice.ids[: prefix + 5]  # up to the token that completes it
    alone = voice.say(monkeypatch, 1, Scripted(lambda ids, count: []), stop=("OPP", "zzz"))
    assert (alone.output, alone.text) == (request.output, request.text)


def test_what_may_begin_a_stop_string_is_held_back(speaking, tokenizer, monkeypatch):
    voice = Voice(speaking, tokenizer, "one STO two")
    assert voice.say(monkeypatch, 2, stop=("STOP",)).text == "one STO two"


def test_several_end_tokens_and_none(speaking, tokenizer, monkeypatch):
    voice = Voice(speaking, tokenizer, "abc", tail=(3, 2))
    assert voice.say(monkeypatch, 5, stop_token_ids=(3, 2)).output == voice.ids[:-1]
    assert len(voice.say(monkeypatch, 5, ignore_eos=True).output) == 60


@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8, 9, 15, 16, 17])
def test_max_new_tokens_is_exact(count, speaking, tokenizer, monkeypatch):
    """T6: B - 1, B, B + 1 and everything else."""
    request = Voice(speaking, tokenizer, "y" * 40).say(monkeypatch, 8, max_new_tokens=count)
    assert len(request.output) == count
    assert request.finish_reason == "length"


def test_a_character_split_over_the_limit_is_flushed(speaking, tokenizer, monkeypatch):
    request = Voice(speaking, tokenizer, "aß").say(monkeypatch, 4, max_new_tokens=2)
    assert request.text == "a\ufffd"


def test_stop_strings_need_a_tokenizer(llama):
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        Request([5], SamplingParams(stop=("x",)), llama)
