"""Answers on their way between corpora: one compact ``.jsonl.gz`` file, about a byte and a half per token.

A row names its prompt by the digest of the given messages (``key``), so that no given prompt is copied, or holds the message that
the target wrote itself. Rows of plain ``prompt_ids`` and ``response_ids``, made elsewhere, are read too.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.files import write_whole
from blockdraft.prompts import PromptRefused, encode
from blockdraft.targets.target import Target
from blockdraft.training.data.corpus import Corpus, Row, differing
from blockdraft.training.data.questions import Given
from blockdraft.training.data.synthesis import message_text, user_frame


def export_answers(corpus: Corpus, target: Target, out: Path) -> int:
    """Write all rows of a corpus; returns how many."""
    licences = {source: sorted(names) for source, names in corpus.licences.items()}
    lines = [json.dumps({"identity": corpus.identity, "licences": licences}) + "\n"]
    thinking = corpus.identity.get("thinking")
    frame = user_frame(target, thinking)
    for row in corpus.rows():
        entry: dict[str, Any] = {"key": row.key, "source": row.source, "answer_ids": row.answer, "finished": row.finished}
        if not row.key.startswith("given/"):
            text = message_text(target, frame, row.prompt)
            same = text.strip() and encode(target, text, thinking=thinking) == row.prompt
            entry |= {"message": text} if same else {"prompt_ids": row.prompt}
        lines.append(json.dumps(entry, separators=(",", ":")) + "\n")
    content = gzip.compress("".join(lines).encode(), mtime=0)
    write_whole(out, lambda path: path.write_bytes(content))
    return len(lines) - 1


def read_answers(path: Path, target: Target, given: Sequence[Given], who: dict[str, Any]) -> Iterator[tuple[Row, str] | None]:
    """Rows of a file, each with the licence of its prompt; None for an answer to a given prompt that is not among ``given``.

    Args:
        who: identity of the corpus that takes them in.

    Raises:
        UsageError: not such a file, or answers of another target, thinking mode or temperature; names the line, or what differs.
    """
    thinking = who.get("thinking")
    licences = {question.key: question.licence for question in given}
    prompts = {question.key: ids for question, ids in _encodable(given, target, thinking)}
    sources = {question.key: question.source for question in given}
    by_ids = {tuple(ids): key for key, ids in prompts.items()}
    of_sources: dict[str, list[str]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read answers from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            if "identity" in entry:
                _refuse_another(path, entry["identity"], who)
                of_sources = dict(entry.get("licences", {}))
                continue
            row = _plain(entry, by_ids, sources, target) if "response_ids" in entry else _compact(entry, prompts, target, thinking)
            if row is not None and not all(0 <= token < target.embedding.num_embeddings for token in (*row.prompt, *row.answer)):
                raise ValueError("token ids outside of the vocabulary")
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}, line {number}: no row of answers ({type(error).__name__}: {error})") from error
        yield None if row is None else (row, licences.get(row.key) or _licence(row, of_sources))


def _licence(row: Row, of_sources: dict[str, list[str]]) -> str:
    """Of a prompt that is not given: the target's own message, or what the file says of its source."""
    return "the target's" if row.key.startswith("written/") else ", ".join(of_sources.get(row.source, ["unknown"]))


def _encodable(given: Sequence[Given], target: Target, thinking: bool | None) -> Iterator[tuple[Given, list[int]]]:
    for question in given:
        with suppress(PromptRefused):  # it has no answer then
            yield question, encode(target, question.messages, thinking=thinking)


def _refuse_another(path: Path, found: dict[str, Any], who: dict[str, Any]) -> None:
    lengths = ("target", "max_new_tokens", "context")  # answers of other lengths are the target's all the same
    others = differing(found, who, [key for key in who if key not in lengths])
    if others:
        key = others[0]
        raise UsageError(
            f"{path} holds answers of {found.get('target')} with {key} {found.get(key)!r}, the corpus has {who[key]!r}"
        )


def _compact(entry: dict[str, Any], prompts: dict[str, list[int]], target: Target, thinking: bool | None) -> Row | None:
    key = entry["key"]
    prompt = prompts.get(key) if key.startswith("given/") else entry.get("prompt_ids")
    if prompt is None and "message" in entry:
        prompt = encode(target, entry["message"], thinking=thinking)
    return None if prompt is None else Row(key, entry["source"], prompt, entry["answer_ids"], entry["finished"])


def _plain(entry: dict[str, Any], by_ids: dict[tuple[int, ...], str], sources: dict[str, str], target: Target) -> Row:
    prompt, answer = list(entry["prompt_ids"]), list(entry["response_ids"])
    key = by_ids.get(tuple(prompt))
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
    finished = bool(answer) and answer[-1] in target.end_tokens
    return Row(key or f"elsewhere/{digest}", sources[key] if key else "elsewhere", prompt, answer, finished)
