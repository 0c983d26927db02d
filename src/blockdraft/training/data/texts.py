"""Teacher-forced text: a second kind of corpus, for a first, broad stage of training.

Nothing is generated: the text is cut into rows, and training runs them through the target, whose own probabilities at every
position are the labels. What the text says next is only the path along which the target is asked.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from blockdraft.errors import UsageError
from blockdraft.targets.target import Target
from blockdraft.training.data.corpus import TEXT, Row
from blockdraft.training.data.questions import dataset_rows

START = 16  # tokens of a row before the first anchor: something to go on


def text_rows(places: Sequence[str], target: Target, length: int) -> Iterator[tuple[Row, str]]:
    """Rows of ``length`` tokens and their licence; what is left at the end of a text is kept if it has room for blocks.

    Args:
        places: text files, folders of them, or Hugging Face datasets with a ``text`` column.

    Raises:
        UsageError: a place that is none of these.
    """
    assert target.tokenizer is not None
    for place in places:
        for text, licence in _texts(place):
            ids = list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
            for start in range(0, len(ids), length):
                part = ids[start : start + length]
                if len(part) >= 2 * START:
                    digest = hashlib.sha256(repr(part).encode()).hexdigest()[:16]
                    yield Row(f"{TEXT}/{digest}", TEXT, part[:START], part[START:], False), licence


def _texts(place: str) -> Iterator[tuple[str, str]]:
    path = Path(place).expanduser()
    if path.exists():
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        read = 0
        for file in files:
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError:
                continue  # a picture in a folder of texts
            read += 1
            yield text, "unknown"
        if not read:
            raise UsageError(f"{place} holds no UTF-8 text")
        return
    for row, licence in dataset_rows(place):
        if not isinstance(row.get("text"), str):
            raise UsageError(f"dataset {place} has columns {', '.join(row)}, but no text")
        yield row["text"], licence
