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

from blockdraft.engine.packing import pack_linears
from blockdraft.errors import UsageError
from blockdraft.files import write_whole

FILE = "shortlist.json"


class Shortlist:
    """Words to draft from, and the rows of a head that belong to them.

    Args:
        ids: ``[words]`` int64.
        weight: ``[words, hidden]``, in the dtype that is computed in.
        bias: ``[words]`` or None.
        vocabulary: of the target.

    Attributes:
        bytes: of these rows, packed copy included.
    """

    def __init__(self, ids: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int):
        self.ids, self.vocabulary = ids, vocabulary
        self._linear = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
        self._linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self._linear.bias = nn.Parameter(bias, requires_grad=False)
        self.bytes = weight.numel() * weight.element_size() + pack_linears([[self._linear]], weight.dtype, weight.device)

    @classmethod
    def of(cls, ids: Tensor, head: nn.Linear) -> "Shortlist":
        """Copies of the target's own rows."""
        ids = ids.to(head.weight.device)
        bias = head.bias.detach()[ids].clone() if head.bias is not None else None
        return cls(ids, head.weight.detach()[ids].clone(), bias, head.out_features)

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
