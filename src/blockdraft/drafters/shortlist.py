"""Shortlist: the words that drafts are chosen from, where the target's whole vocabulary would cost more than the drafter itself.

A small file beside the drafter holds the most frequent words of its corpus. The target verifies over its whole vocabulary, so a
word that is not on the list is never drafted, and nothing else changes. Other engines do not read the file, which is therefore no
safetensors file: vLLM loads every one of those in a folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.packing import pack_linears
from blockdraft.store import write_whole

FILE = "shortlist.json"


class Shortlist:
    """The rows of a target's head that belong to some words.

    Args:
        ids: ``[words]`` int64.
        head: the target's.

    Attributes:
        bytes: of these rows, packed copy included.
    """

    def __init__(self, ids: Tensor, head: nn.Linear):
        self.ids, self.vocabulary = ids.to(head.weight.device), head.out_features
        self._linear = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        self._linear.weight = nn.Parameter(head.weight.detach()[self.ids].clone(), requires_grad=False)
        if head.bias is not None:
            self._linear.bias = nn.Parameter(head.bias.detach()[self.ids].clone(), requires_grad=False)
        own = self._linear.weight
        self.bytes = own.numel() * own.element_size() + pack_linears([[self._linear]], own.dtype, own.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., words]`` of ``[..., hidden]``."""
        return self._linear(hidden)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits ``[..., words]`` over the whole vocabulary; minus infinity for words that are not on the list."""
        return spread(logits, self.ids, self.vocabulary)


def spread(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Logits ``[..., words]`` of some ids over the whole vocabulary; minus infinity elsewhere."""
    out = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    out[..., ids] = logits
    return out


def read_shortlist(folder: Path, rows: int) -> Tensor | None:
    """The ids of a drafter folder's shortlist, most frequent first; None if it has none.

    Raises:
        UsageError: a damaged file, or ids outside of a vocabulary of ``rows`` words.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        ids = torch.tensor([int(i) for i in json.loads(path.read_text())["ids"]], dtype=torch.long)
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RuntimeError) as error:
        raise UsageError(f"{path} is damaged or no shortlist: {error}; delete it to draft from the whole vocabulary") from error
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= rows or len(ids.unique()) < len(ids):
        raise UsageError(f"{path} must list different ids from 0 to {rows - 1}; delete it to draft from the whole vocabulary")
    return ids


def write_shortlist(ids: Sequence[int], folder: Path) -> None:
    """Write the file; no ids: remove it."""
    path = folder / FILE
    (folder / "shortlist.safetensors").unlink(missing_ok=True)  # its first form
    if not ids:
        path.unlink(missing_ok=True)
        return
    write_whole(path, lambda beside: beside.write_text(json.dumps({"ids": list(ids)}) + "\n"))
