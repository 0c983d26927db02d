"""Drafters for tests: what they propose is known, whatever the target says."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.base import Draw
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target

COUNT = 24  # tokens of an answer


def run(target, drafter, prompts, batch_size=1, **params):  # type: ignore[no-untyped-def]
    """Requests of ``COUNT`` tokens each, whatever ends would stop them, decoded to the end."""
    params = SamplingParams(**{"max_new_tokens": COUNT, "stop_token_ids": (), **params})
    requests = [Request(prompt, params, target, row) for row, prompt in enumerate(prompts)]
    for _ in decode(target, drafter, requests, batch_size):
        pass
    return requests


class Scripted:
    """Proposes ``guess(ids so far of the row, count) -> tokens``; keeps what it observed, like any drafter."""

    def __init__(self, guess: Callable[[list[int], int], Sequence[int]], block_size: int = 8):
        self.guess, self.block_size = guess, block_size
        self.name, self.method, self.taps = "scripted", "scripted", ()
        self.forwards = 0

    def room(self, block_size: int) -> int:
        return block_size

    def reset(self, rows: int, capacity: int) -> None:
        self.seen: list[list[int]] = [[] for _ in range(rows)]

    def observe(self, row: int, tokens: Tensor, features: Tensor | None, counts: Sequence[int]) -> None:
        for i, count in enumerate(counts):
            self.seen[row + i] += tokens[i, :count].tolist()

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        self.forwards += 1
        most = max(widths) - 1
        tokens = []
        for row, width in enumerate(widths):
            guessed = list(self.guess([*self.seen[row], int(anchors[row])], width - 1))[: width - 1]
            tokens.append(guessed + [0] * (most - len(guessed)))
        return Proposal(torch.tensor(tokens, dtype=torch.long).view(len(widths), most), list(widths))

    def bytes(self) -> int:
        return 0

    def truncate(self, row: int, length: int) -> None:
        del self.seen[row][length:]

    def move(self, source: int, target: int) -> None:
        self.seen[target] = list(self.seen[source])


class Bushy(Scripted):
    """A random tree: the guess is hidden among wrong siblings, in random order of nodes."""

    def room(self, block_size: int) -> int:
        return 2 * block_size

    def propose(self, anchors: Tensor, widths: Sequence[int], draw: Draw | None) -> Proposal:
        chain = super().propose(anchors, widths, draw)
        rows, count = chain.tokens.shape
        generator = torch.Generator().manual_seed(self.forwards)
        tokens = torch.zeros(rows, 2 * count, dtype=torch.long)
        parents = torch.zeros(rows, 2 * count, dtype=torch.long)
        for row in range(rows):
            stem = 0
            for i in range(count):
                right_first = bool(torch.randint(0, 2, (), generator=generator))
                wrong = int(torch.randint(3, 60, (), generator=generator))
                guess = int(chain.tokens[row, i])
                pair = [guess, wrong] if right_first else [wrong, guess]
                tokens[row, 2 * i : 2 * i + 2] = torch.tensor(pair)
                parents[row, 2 * i : 2 * i + 2] = stem
                stem = 2 * i + (1 if right_first else 2)
        return Proposal(tokens, [2 * (width - 1) + 1 for width in widths], parents)


def knowing(answers: dict[tuple[int, ...], list[int]], wrong_by: int = 0, vocabulary: int = 60) -> Scripted:
    """Proposes what the target will say (``answers``: prompt -> continuation), or, shifted by ``wrong_by``, never."""

    def guess(ids: list[int], count: int) -> list[int]:
        for prompt, answer in answers.items():
            if tuple(ids[: len(prompt)]) == prompt:
                at = len(ids) - len(prompt)
                return [(token + wrong_by) % vocabulary if wrong_by else token for token in answer[at : at + count]]
        return []

    return Scripted(guess)


def _sizes(target: Target) -> dict[str, Any]:
    """Of a small drafter's layers, for a tiny target."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.embedding.num_embeddings,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _randomise(network: nn.Module, width: float) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, width)
            else:
                parameter.uniform_(0.5, 1.5)


def dflash_config(target: Target, **changes: object) -> DFlashConfig:
    """A small drafter for a tiny target."""
    layers = 2
    backbone = Qwen3Config(**_sizes(target), num_hidden_layers=layers, sliding_window=None)
    plain = {
        "backbone": backbone,
        "block_size": 8,
        "mask_token_id": 3,
        "taps": (0, 1, 3),
        "target_layers": len(target.layers),
        "causal": (False,) * layers,
        "windows": (None,) * layers,
    }
    return DFlashConfig(**{**plain, **changes})  # type: ignore[arg-type]


def random_drafter(target: Target, seed: int = 0, **changes: object) -> DFlashDrafter:
    torch.manual_seed(seed)
    network = DFlash(dflash_config(target, **changes))
    _randomise(network, 0.2)
    return DFlashDrafter(network.to(target.dtype).requires_grad_(False), target.embed, target.head, name="random")


EAGLE3_TAPS = (0, 1, 3)  # the usual ones of a target of five layers are one and the same


def random_eagle3(target: Target, words: int = 40, candidates: int | None = None, seed: int = 0) -> Eagle3Drafter:
    """A small EAGLE-3 drafter for a tiny target, over some of its words."""
    torch.manual_seed(seed)
    backbone = LlamaConfig(**_sizes(target), num_hidden_layers=1)
    config = Eagle3Config(backbone, words, target.embedding.num_embeddings, EAGLE3_TAPS)
    network = Eagle3(config)
    _randomise(network, 0.3)
    with torch.no_grad():
        ids = torch.randperm(config.vocabulary)[:words].sort().values
        network.d2t.copy_(ids - torch.arange(words))
        network.t2d.fill_(False)[ids] = True
    network = network.to(target.dtype).requires_grad_(False)
    return Eagle3Drafter(network, target.embed, target.vocab_size, "random", candidates=candidates)
