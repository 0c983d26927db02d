"""From corpus folders to documents: checked against the target, cut to a row, a part held out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError
from blockdraft.rules.sampling import counter_uniform
from blockdraft.targets.target import Target
from blockdraft.training.batches import Document
from blockdraft.training.data.corpus import TEXT, Corpus, differing, identity

# What must be equal between a corpus and the target it trains a drafter for.
WHO = ("target", "weights_sha256", "config_sha256", "tokenizer_sha256", "template_sha256")


@dataclass
class Documents:
    """What a run reads.

    Attributes:
        train, held_out: disjoint.
        tokens: answer tokens of the training documents, by source.
        dropped, cut: conversations without a place for a block, and those longer than a row.
        licences: of the prompts, by source.
        made_with: thinking mode, sampling and lengths of the corpora, all values of each.
    """

    train: list[Document]
    held_out: list[Document]
    tokens: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    cut: int = 0
    licences: dict[str, set[str]] = field(default_factory=dict)
    made_with: dict[str, list[Any]] = field(default_factory=dict)


def read_documents(
    corpora: Sequence[str], target: Target, length: int, held_out: int, seed: int, thinking: bool | None = None
) -> Documents:
    """All conversations of the corpora, in a fixed order.

    Args:
        length: tokens that a conversation is cut to.
        held_out: conversations kept out of training: of the target's own, if there are enough of them.
        thinking: the mode that all corpora must have been made in; None: whichever it is, but the same.

    Raises:
        UsageError: no corpus, one of another target (names what differs), corpora of different kinds, a damaged shard, or fewer
            conversations than are to be held out.
    """
    if not corpora:
        raise UsageError("no corpus: name folders made by `blockdraft data` with corpus=FOLDER")
    found = Documents([], [])
    seen: set[tuple[int, ...]] = set()
    for place in corpora:
        corpus = Corpus(Path(place).expanduser())
        _refuse_another(corpus, target)
        _refuse_another_mode(place, corpus.identity.get("thinking"), thinking, found.made_with.get("thinking", []))
        for key, value in corpus.identity.items():
            if key not in WHO and value not in found.made_with.setdefault(key, []):
                found.made_with[key].append(value)
        for source, names in corpus.licences.items():
            found.licences[source] = found.licences.get(source, set()) | names
        for row in corpus.rows():
            ids = [*row.prompt, *row.answer][:length]
            found.cut += len(row.prompt) + len(row.answer) > length
            asked = tuple(ids) if row.source == TEXT else tuple(row.prompt)
            if len(ids) < len(row.prompt) + 2 or asked in seen:
                found.dropped += 1
                continue
            seen.add(asked)
            found.train.append(Document(row.key, row.source, ids, len(row.prompt)))
    if len(found.train) <= held_out:
        raise UsageError(f"held_out is {held_out}, but the corpus has only {len(found.train)} conversations; hold out fewer")
    # The order is that of the keys' digests, not of files: every reading of the same corpora holds out the same conversations.
    found.train.sort(key=lambda d: counter_uniform(seed, *d.key.encode()))
    own = [document for document in found.train if not document.foreign]
    found.held_out = (own if len(own) > held_out else found.train)[:held_out]
    kept = set(map(id, found.held_out))
    found.train = [document for document in found.train if id(document) not in kept]
    for document in found.train:
        found.tokens[document.source] += len(document.ids) - document.start
    return found


def frequent_words(documents: Sequence[Document]) -> Tensor:
    """Tokens of the answers by falling frequency, int64."""
    counts = Counter(token for d in documents for token in d.ids[d.start :])
    return torch.tensor([token for token, _ in counts.most_common()])


def _refuse_another_mode(place: str, mode: bool | None, asked: bool | None, others: Sequence[bool | None]) -> None:
    if asked is not None and mode != asked:
        raise UsageError(f"corpus {place} was made with thinking {_mode(mode)}, the recipe asks for {_mode(asked)}")
    if others and mode not in others:
        raise UsageError(f"corpus {place} was made with thinking {_mode(mode)}, another with {_mode(others[0])}")


def _mode(thinking: bool | None) -> str:
    return {True: "on", False: "off", None: "as its template has it"}[thinking]


def _refuse_another(corpus: Corpus, target: Target) -> None:
    who = identity(target)
    others = differing(corpus.identity, who, WHO)
    if others == ["target"] and who["weights_sha256"] is not None:
        return  # the same weights under another name or path
    if others:
        raise UsageError(
            f"corpus {corpus.folder} is not of target {target.name}: {', '.join(others)} differ{'s' * (len(others) == 1)} "
            f"({corpus.identity.get(others[0])!r} there, {who[others[0]]!r} here)"
        )
