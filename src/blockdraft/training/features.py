"""Features: the target's tapped hidden states of a document, computed in every step or kept from the first time on."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.files import lock, write_whole
from blockdraft.targets.target import Target
from blockdraft.training.batches import Batch, Document

PASS_TOKENS = {"cpu": 512, "cuda": 32768}  # padded tokens of one target pass: bounds its activations


class Features:
    """Features of documents, ``[tokens, (taps + 1) * hidden]``: the tapped outputs, then what the head reads.

    Args:
        target: frozen.
        documents: of the run; asked for by index.
        taps: target layers.
        last: keep what the head reads too, for distillation.
        place: "online", "memory", or a folder to keep them in.

    Raises:
        UsageError: not enough free disk space for the folder, or it holds features of something else.
    """

    def __init__(
        self, target: Target, documents: Sequence[Document], taps: Sequence[int], last: bool, place: str | Path = "online"
    ):
        self.target, self.documents, self.taps, self.last = target, documents, tuple(taps), last
        self.width = (len(self.taps) + last) * target.hidden_size
        self._memory: dict[int, Tensor] | None = {} if place == "memory" else None
        self._disk = Disk(place, self) if isinstance(place, Path) else None

    def bytes(self) -> int:
        """What all documents take, in the target's dtype."""
        return sum(len(d.ids) for d in self.documents) * self.width * self.target.dtype.itemsize

    def of(self, indices: Sequence[int]) -> list[Tensor]:
        """``[tokens, width]`` for each document.

        Raises:
            BlockdraftError: the target put out numbers that are not finite; names the conversation.
        """
        known = {i: found for i in indices if (found := self._kept(i)) is not None}
        for group in _groups([i for i in dict.fromkeys(indices) if i not in known], self.documents, self.target.device):
            for index, value in zip(group, self._compute(group), strict=True):
                known[index] = value
                self._keep(index, value)
        return [known[i] for i in indices]

    def flush(self) -> None:
        """Make features on disk last; what is computed after this is computed again after a kill."""
        if self._disk is not None:
            self._disk.flush()

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Features ``[rows, length, taps * hidden]`` of packed rows, zero on padding, and what the head reads, if kept."""
        found = iter(self.of([index for members in batch.members for index in members]))
        out = torch.zeros(*batch.ids.shape, self.width, dtype=self.target.dtype, device=self.target.device)
        for row, members in enumerate(batch.members):
            start = 0
            for value in (next(found) for _ in members):
                out[row, start : start + len(value)] = value.to(out.device)
                start += len(value)
        if not self.last:
            return out, None
        split = len(self.taps) * self.target.hidden_size
        return out[..., :split], out[..., split:]

    def _compute(self, group: list[int]) -> list[Tensor]:
        lengths = [len(self.documents[i].ids) for i in group]
        ids = torch.zeros(len(group), max(lengths), dtype=torch.long)
        for row, index in enumerate(group):
            ids[row, : lengths[row]] = torch.tensor(self.documents[index].ids)
        features, last = self.target.read(ids.to(self.target.device), self.taps)
        both = torch.cat([features, last], dim=-1) if self.last else features
        values = [both[row, :length].clone() for row, length in enumerate(lengths)]
        for index, value in zip(group, values, strict=True):
            if not value.isfinite().all():
                raise BlockdraftError(f"the target's features of conversation {self.documents[index].key} are not finite numbers")
        return values

    def _kept(self, index: int) -> Tensor | None:
        if self._memory is not None:
            return self._memory.get(index)
        return self._disk.read(index) if self._disk is not None else None

    def _keep(self, index: int, value: Tensor) -> None:
        if self._memory is not None:
            self._memory[index] = value.cpu()
        if self._disk is not None:
            self._disk.write(index, value)


def _groups(indices: list[int], documents: Sequence[Document], device: torch.device) -> list[list[int]]:
    """Documents of like length for one padded pass each."""
    most = PASS_TOKENS.get(device.type, 8192)
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda i: len(documents[i].ids)):
        if not groups or (len(groups[-1]) + 1) * len(documents[index].ids) > most:
            groups.append([])
        groups[-1].append(index)
    return groups


class Disk:
    """One file of all features, each document at its place, and one byte per document that tells what is there.

    Processes of one machine share it: what one of them computed the others find when they look at the flags again.
    """

    def __init__(self, folder: Path, features: Features):
        self._dtype = features.target.dtype
        lengths = [len(d.ids) for d in features.documents]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        keys = hashlib.sha256(json.dumps([(d.key, d.ids) for d in features.documents]).encode()).hexdigest()
        identity = {
            "target": features.target.name,
            "weights_sha256": features.target.digest,
            "taps": list(features.taps),
            "width": features.width,
            "dtype": str(self._dtype),
            "documents_sha256": keys,
        }
        shape = (int(self._starts[-1]), features.width * self._dtype.itemsize)
        self._folder, self._flags = folder, folder / "there.bin"
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / ".lock"):
            if (folder / "features.json").exists():
                self._check(identity, shape[0] * shape[1], len(lengths))
            else:
                self._make(identity, shape[0] * shape[1], len(lengths))
            self._there = bytearray(self._flags.read_bytes())
        self._bytes = np.memmap(folder / "features.bin", np.uint8, "r+", shape=shape)

    def _check(self, identity: dict[str, object], size: int, documents: int) -> None:
        try:
            found = json.loads((self._folder / "features.json").read_text())
            sizes = {name: (self._folder / name).stat().st_size for name in ("features.bin", "there.bin")}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._folder} holds damaged features ({error}); delete the folder") from error
        differing = [key for key in identity if found.get(key) != identity[key]]
        if differing:
            raise UsageError(
                f"{self._folder} holds features of another {differing[0]} ({found.get(differing[0])}); delete the folder"
            )
        for name, wanted in (("features.bin", size), ("there.bin", documents)):
            if sizes[name] != wanted:
                raise UsageError(f"{self._folder / name} has {sizes[name]} bytes instead of {wanted}; delete the folder")

    def _make(self, identity: dict[str, object], size: int, documents: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if size > 0.95 * free:
            raise UsageError(
                f"features take {size / 1e9:.1f} GB, {self._folder} has {free / 1e9:.1f} GB free; "
                "use features=online, or another out"
            )
        with (self._folder / "features.bin").open("wb") as file:
            reserve(file.fileno(), size)
        write_whole(self._flags, lambda path: path.write_bytes(bytes(documents)))
        write_whole(self._folder / "features.json", lambda path: path.write_text(json.dumps(identity, indent=1) + "\n"))

    def read(self, index: int) -> Tensor | None:
        if not self._there[index]:
            return None
        part = np.array(self._bytes[self._starts[index] : self._starts[index + 1]])
        return torch.from_numpy(part).view(self._dtype)

    def write(self, index: int, value: Tensor) -> None:
        self._bytes[self._starts[index] : self._starts[index + 1]] = value.cpu().contiguous().view(torch.uint8).numpy()
        self._there[index] = 1

    def flush(self) -> None:
        """Make what was written so far last: first the features, then the flags that promise them, and see those of others."""
        self._bytes.flush()
        with lock(self._folder / ".lock"):
            self._there = bytearray(ours | theirs for ours, theirs in zip(self._there, self._flags.read_bytes(), strict=True))
            write_whole(self._flags, lambda path: path.write_bytes(self._there))


def reserve(file: int, size: int) -> None:
    """Give an open file its whole size on the disk, where the system can: a sparse one would fail later, in mid-write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)
