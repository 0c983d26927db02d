"""Where questions come from: JSONL files or Hugging Face datasets, each with its source and licence."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.prompts import Message, PromptRefused, encode, read_prompts
from blockdraft.targets.target import Target

MARKS, QUOTES = ".,;:!?\u2026", "\"'`\u2018\u2019\u201c\u201d"


@dataclass(frozen=True)
class Given:
    """A prompt from a file or dataset.

    Attributes:
        key: unique in a corpus; of given messages their digest.
        source: the kind it counts as.
        messages: of the conversation up to the answer.
        licence: of the prompt, as far as its file or dataset tells.
    """

    key: str
    source: str
    messages: list[Message]
    licence: str = "unknown"


def given_questions(places: Sequence[str], per_source: int | None, seed: int) -> list[Given]:
    """The first turns of all rows, in random order, no message twice, at most ``per_source`` of each source.

    Args:
        places: JSONL files (rows with ``prompt``, ``turns`` or ``messages``; ``source`` and ``license`` are kept), or Hugging Face
            dataset ids and folders.
    """
    questions = [question for place in places for question in _read(place)]
    questions = list({question.key: question for question in questions}.values())
    random.Random(seed).shuffle(questions)
    seen: Counter[str] = Counter()
    kept = []
    for question in questions:
        seen[question.source] += 1
        if per_source is None or seen[question.source] <= per_source:
            kept.append(question)
    return kept


def encoded(
    given: Sequence[Given], target: Target, thinking: bool | None, dropped: Counter[str]
) -> Iterator[tuple[Given, list[int]]]:
    """Questions with their token ids; what is another one but for case, blanks and punctuation is left out.

    Args:
        dropped: counts those, and what the target's template refuses.
    """
    seen: set[str] = set()
    for question in given:
        text = normalised("\n".join(message["content"] for message in question.messages))
        if text in seen:
            dropped["near-duplicates"] += 1
            continue
        seen.add(text)
        try:
            ids = encode(target, question.messages, thinking=thinking)
        except PromptRefused:
            dropped["refused by the template"] += 1
            continue
        yield question, ids


def normalised(text: str) -> str:
    """What near-duplicates have in common: their words in lower case, without quotes and the marks that end a sentence.

    Whatever is within a word, and every operator, is meaning: 3.5 is not 35, a + b is not a - b.
    """
    words = (word.strip(QUOTES).rstrip(MARKS).strip(QUOTES) for word in text.lower().split())
    return " ".join(word for word in words if word)


def _read(place: str) -> Iterable[Given]:
    path = Path(place).expanduser()
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        return _of_file(path)
    return _of_dataset(place)


def _of_file(path: Path) -> Iterator[Given]:
    conversations = read_prompts(path)
    rows = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
    for turns, row in zip(conversations, rows, strict=True):
        messages = _until_first_answer(turns[0])
        if messages:
            yield _question(messages, row, path.stem)


def _of_dataset(name: str) -> Iterator[Given]:
    for row, licence in dataset_rows(name):
        messages = _messages(row)
        if messages is None:
            raise UsageError(
                f"dataset {name} has columns {', '.join(row)}; it needs prompt, turns, messages, conversations or instruction"
            )
        if messages:
            yield _question(messages, {"license": licence, **row}, name)


def dataset_rows(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows and licence of the ``train`` split of a dataset on the Hugging Face hub, or in a folder.

    Raises:
        UsageError: ``datasets`` is not installed, or there is no such dataset.
    """
    try:
        import datasets
    except ImportError:
        raise UsageError(f"{name} is no file; to read it as a dataset, install `pip install blockdraft[data]`") from None
    datasets.disable_progress_bars()
    try:
        split = datasets.load_dataset(name, split="train")
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{name} is neither a file nor a dataset that can be read: {reason}") from error
    licence = getattr(split.info, "license", "") or "unknown"
    for row in split:
        yield row, licence


def _messages(row: dict[str, Any]) -> list[Message] | None:
    """The first user turn of a dataset's row, after its system message if there is one; None: no known column."""
    if isinstance(row.get("turns"), list):
        return [{"role": "user", "content": row["turns"][0]}]
    for name in ("messages", "conversations", "conversation"):
        turns = row.get(name)
        if isinstance(turns, list):
            return _until_first_answer(turns)
    for name in ("prompt", "instruction", "question", "query"):
        if isinstance(row.get(name), str):
            extra = row.get("input") if name == "instruction" else None
            return [{"role": "user", "content": f"{row[name]}\n\n{extra}" if extra else row[name]}] if row[name].strip() else []
    return None


def _until_first_answer(turns: list[dict[str, str]]) -> list[Message]:
    roles = {"human": "user", "gpt": "assistant"}
    messages: list[Message] = []
    for turn in turns:
        role = turn.get("role") or turn.get("from") or ""
        role = roles.get(role, role)
        if role == "assistant":
            break
        messages.append({"role": role, "content": turn.get("content") or turn.get("value") or ""})
    return messages if messages and messages[-1]["role"] == "user" and messages[-1]["content"].strip() else []


def _question(messages: list[Message], row: dict[str, Any], default: str) -> Given:
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    licence = row.get("license") or row.get("licence") or "unknown"
    return Given(f"given/{digest}", str(row.get("source") or default), messages, str(licence))
