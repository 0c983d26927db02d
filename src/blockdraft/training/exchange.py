"""Answers on their way between corpora: one compact ``.jsonl.gz`` file, about a byte and a half per token.

A row names its prompt by the digest of the given messages (``key``), so that no given prompt is copied, or holds the message that
the target wrote itself. Rows of plain ``prompt_ids`` and ``response_ids``, made elsewhere, are read too.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.prompts import encode
from blockdraft.store import write_whole
from blockdraft.target import Target
from blockdraft.training.corpus import Corpus, Row


def export_answers(corpus: Corpus, target: Target, out: Path) -> int:
    """Write all rows of a corpus; returns how many."""
    lines = []
    for row in corpus.rows():
        entry: dict[str, Any] = {"key": row.key, "source": row.source, "answer_ids": row.answer, "finished": row.finished}
        if not row.key.startswith("given/"):
            text = _message(target, row.prompt)
            entry |= {"message": text} if text is not None else {"prompt_ids": row.prompt}
        lines.append(json.dumps(entry, separators=(",", ":")) + "\n")
    content = gzip.compress("".join(lines).encode(), mtime=0)
    write_whole(out, lambda path: path.write_bytes(content))
    return len(lines)


def _message(target: Target, prompt: list[int]) -> str | None:
    """The user's message whose encoding is exactly this prompt, if there is one."""
    from blockdraft.training.synthesis import user_header

    assert target.tokenizer is not None
    header = user_header(target)
    behind = len(encode(target, "x")) - len(header) - 1  # tokens of the template behind a message
    text = str(target.tokenizer.decode(prompt[len(header) : len(prompt) - behind]))
    return text if text.strip() and encode(target, text) == prompt else None


def read_answers(path: Path, target: Target, given: dict[str, list[int]], sources: dict[str, str]) -> Iterator[Row | None]:
    """Rows of a file; None for a given prompt that is not among ``given``.

    Args:
        given: encoded prompts by key, of the prompt files of this run.
        sources: kind of each of them.

    Raises:
        UsageError: not such a file; names the line.
    """
    by_ids = {tuple(ids): key for key, ids in given.items()}
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
            if "response_ids" in entry:
                yield _plain(entry, by_ids, sources, target)
                continue
            key, source = entry["key"], entry["source"]
            prompt = given.get(key) if key.startswith("given/") else entry.get("prompt_ids") or encode(target, entry["message"])
            yield Row(key, source, prompt, entry["answer_ids"], entry["finished"]) if prompt is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}, line {number}: no row of answers ({type(error).__name__}: {error})") from error


def _plain(entry: dict[str, Any], by_ids: dict[tuple[int, ...], str], sources: dict[str, str], target: Target) -> Row:
    prompt, answer = list(entry["prompt_ids"]), list(entry["response_ids"])
    key = by_ids.get(tuple(prompt))
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
    finished = bool(answer) and answer[-1] in target.end_tokens
    return Row(key or f"elsewhere/{digest}", sources[key] if key else "elsewhere", prompt, answer, finished)
