"""Corpus: the target's own answers on disk, with the identity of who gave them.

A folder with ``corpus.json`` and shards ``answers-NNNNN.safetensors``. Rows that are not in a shard yet wait in
``pending.jsonl``, one whole line each, so that a killed run loses nothing that was finished.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import UsageError
from blockdraft.files import lock, write_whole
from blockdraft.load import digest_of
from blockdraft.targets.target import Target

SHARD_ROWS = 1024
TEXT = "text"  # source of rows that the target did not write: its probabilities are their labels, not their tokens


@dataclass(frozen=True)
class Row:
    """One answer.

    Attributes:
        key: what was asked: unique in the corpus; a run that starts again skips the keys it finds.
        source: the kind of prompt, for counts and balance.
        prompt, answer: token ids; the answer ends with an end token if it was finished.
        finished: False if the answer was cut at the limit.
    """

    key: str
    source: str
    prompt: list[int]
    answer: list[int]
    finished: bool


def identity(target: Target, **settings: object) -> dict[str, Any]:
    """Who answers, and how: training refuses a corpus whose identity is another.

    Args:
        settings: sampling and whatever else decides what an answer is.
    """
    assert target.tokenizer is not None
    # The dtype it was loaded in and the version that wrote the config do not change who it is.
    passing = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "_attn_implementation")
    architecture = {key: value for key, value in target.config.to_dict().items() if key not in passing}
    return {
        "target": target.name,
        "weights_sha256": digest_of(target),
        "config_sha256": _sha(json.dumps(architecture, sort_keys=True, default=str)),
        "tokenizer_sha256": _sha(target.tokenizer.backend_tokenizer.to_str()),
        "template_sha256": _sha(target.tokenizer.chat_template or ""),
        **settings,
    }


def differing(found: dict[str, Any], who: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """Which of the keys two identities do not share."""
    return [key for key in keys if found.get(key) != who.get(key)]


def written_key(seed: int, number: int) -> str:
    """The key of a self-written message."""
    return f"written/{seed}/{number}"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Corpus:
    """A corpus folder, read and extended.

    It has an identity from its first row on: what was refused before leaves a folder that any target can have.

    Args:
        folder: made if it is not there.
        identity: of the target; None: only read.

    Raises:
        UsageError: the folder holds the answers of another target, template or sampling (names what differs), is no corpus,
            holds a damaged shard, or is being written by another process.
    """

    def __init__(self, folder: Path, identity: dict[str, Any] | None = None):
        self.folder = folder
        manifest = folder / "corpus.json"
        if manifest.exists():
            self.identity = json.loads(manifest.read_text())["identity"]
            self._refuse_another(identity or self.identity)
        elif identity is None:
            raise UsageError(f"{folder} is not a corpus: it has no corpus.json")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.identity = identity
        if identity is not None:
            self._lock = lock(folder / ".lock", f"another run is writing to {folder}; wait for it, or take another folder")
        known = json.loads(manifest.read_text()).get("licences", {}) if manifest.exists() else {}
        self.licences: dict[str, set[str]] = {source: set(found) for source, found in known.items()}
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.keys: set[str] = set()
        for row in self._sharded_rows():
            self._note(row)
        # A kill between shard and journal leaves rows in both.
        self._pending = [row for row in self._read_pending() if row.key not in self.keys]
        for row in self._pending:
            self._note(row)
        self._begun = manifest.exists()
        if identity is not None and self._begun:
            self._write_pending()  # without the line that a kill cut: the next row must not be appended to it
            self._write_manifest()

    def _refuse_another(self, identity: dict[str, Any]) -> None:
        others = differing(self.identity, identity, sorted(self.identity.keys() | identity.keys()))
        if others:
            found = ", ".join(f"{key} {self.identity.get(key)!r} instead of {identity.get(key)!r}" for key in others)
            raise UsageError(f"corpus {self.folder} was made with {found}; take another folder")

    def rows(self) -> Iterator[Row]:
        """All rows, in the order they were stored."""
        yield from self._sharded_rows()
        yield from self._pending

    def add(self, row: Row, licence: str = "the target's") -> None:
        """Store a row: when this returns it survives a kill of the process, and from the next shard on a loss of power.

        Args:
            licence: of its prompt; a message that the target wrote itself has the target's.
        """
        self._licence(row.source, licence)
        with (self.folder / "pending.jsonl").open("a") as journal:
            journal.write(_line(row))
        self._note(row)
        self._pending.append(row)
        if len(self._pending) >= SHARD_ROWS:
            self.seal()

    def take(self, row: Row, licence: str = "the target's") -> None:
        """Store a row that can be had again, without waiting for the disk; ``seal`` makes it last."""
        self._licence(row.source, licence)
        self._note(row)
        self._pending.append(row)
        if len(self._pending) >= SHARD_ROWS:
            self.seal()

    def _licence(self, source: str, licence: str) -> None:
        """Note the licence of a row that comes; a new one is on disk before its row is."""
        known = self.licences.setdefault(source, set())
        if licence not in known or not self._begun:
            known.add(licence)
            self._write_manifest()

    def last_written(self, seed: int) -> int:
        """The highest number of a self-written message of this seed that is answered; 0 if there is none."""
        mine = written_key(seed, 0).rpartition("/")[0] + "/"
        return max((int(key.removeprefix(mine)) for key in self.keys if key.startswith(mine)), default=0)

    def seal(self) -> None:
        """Move what is pending into a shard."""
        if not self._pending:
            return
        last = max((int(path.stem.removeprefix("answers-")) for path in self._shards()), default=-1)
        shard = self.folder / f"answers-{last + 1:05d}.safetensors"
        write_whole(shard, lambda path: _write_shard(path, self._pending))
        self._pending = []
        self._write_pending()
        self._write_manifest()

    def _note(self, row: Row) -> None:
        self.keys.add(row.key)
        self.counts[row.source] += 1
        self.tokens[row.source] += len(row.answer)

    def _write_pending(self) -> None:
        write_whole(self.folder / "pending.jsonl", lambda path: path.write_text("".join(map(_line, self._pending))))

    def _write_manifest(self) -> None:
        content = {
            "identity": self.identity,
            "rows": dict(self.counts),
            "answer_tokens": dict(self.tokens),
            "licences": {source: sorted(found) for source, found in self.licences.items()},
        }
        write_whole(self.folder / "corpus.json", lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
        self._begun = True

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("answers-*.safetensors"))

    def _sharded_rows(self) -> Iterator[Row]:
        for shard in self._shards():
            yield from self._read_shard(shard)

    def _read_pending(self) -> list[Row]:
        path = self.folder / "pending.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")
        return [Row(**json.loads(line)) for line in lines[:-1]]  # what has no line end was cut by a kill

    @staticmethod
    def _read_shard(path: Path) -> list[Row]:
        try:
            tensors = load_file(path)
            texts = json.loads(bytes(tensors["texts"].tolist()))
            prompts, answers = (_split(tensors, name) for name in ("prompt", "answer"))
            finished = tensors["finished"].tolist()
        except Exception as error:
            raise UsageError(f"{path} is damaged: {error}; delete it and run again to make its rows anew") from error
        return [
            Row(key, source, prompt, answer, bool(done))
            for (key, source), prompt, answer, done in zip(texts, prompts, answers, finished, strict=True)
        ]


def _line(row: Row) -> str:
    return json.dumps(asdict(row)) + "\n"


def _write_shard(path: Path, rows: list[Row]) -> None:
    texts = json.dumps([(row.key, row.source) for row in rows]).encode()
    tensors = {"finished": torch.tensor([row.finished for row in rows]), "texts": torch.tensor(list(texts), dtype=torch.uint8)}
    for name in ("prompt", "answer"):
        ids = [getattr(row, name) for row in rows]
        tensors[f"{name}_tokens"] = torch.tensor([token for row in ids for token in row], dtype=torch.int32)
        tensors[f"{name}_lengths"] = torch.tensor([len(row) for row in ids], dtype=torch.int32)
    save_file(tensors, path, metadata={"format": "pt"})


def _split(tensors: dict[str, torch.Tensor], name: str) -> list[list[int]]:
    parts = tensors[f"{name}_tokens"].split(tensors[f"{name}_lengths"].tolist())
    return [part.tolist() for part in parts]
