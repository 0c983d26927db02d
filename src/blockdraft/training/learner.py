"""Learner: a drafter in training, and what one step does to it.

    rows -> features of the frozen target -> blocks through the drafter -> loss -> gradients -> optimiser

Gradients are sums until the end of a step: they are divided once, by the weight of the *global* batch, so that splitting a batch
over passes or processes changes nothing (but for dropout and the sample of a reduced vocabulary, which each pass draws for itself).
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from blockdraft.drafters.eagle3 import Eagle3
from blockdraft.drafters.network import DFlash
from blockdraft.errors import UsageError
from blockdraft.training.augment import noisy, revealed
from blockdraft.training.batches import Batch, Document, seed_of
from blockdraft.training.blocks import Blocks, block_embeddings
from blockdraft.training.config import TrainConfig
from blockdraft.training.features import Features
from blockdraft.training.loss import Words, block_loss, choices, some_words
from blockdraft.training.metrics import Sums
from blockdraft.training.optimizer import make_optimizer, set_rate
from blockdraft.training.run import precision_of, prepare
from blockdraft.training.unrolled import Unrolled


class NotFinite(Exception):
    """A step's loss or gradient is not a finite number; ``args``: keys of its conversations."""


class Learner:
    """The drafter, spread over all processes, with its optimiser, data and loss.

    Args:
        config: the recipe.
        accelerator: of the processes.
        place: where features are kept that are kept on disk.

    Attributes:
        run: target, network, documents, batches.
        blocks: the module that is trained.
        precision: what the drafter multiplies in.

    Raises:
        UsageError: anything in the config that does not fit target, corpus or machine.
    """

    def __init__(self, config: TrainConfig, accelerator: Accelerator, place: Path):
        self.config, self.accelerator, self.place = config, accelerator, place
        self.parts, self.part = accelerator.num_processes, accelerator.process_index
        self.run = prepare(config, str(accelerator.device))
        self.target, self.device = self.run.target, self.run.target.device
        self.precision = precision_of(config, self.device)
        if config.attention == "flex" and self.device.type == "cpu":
            raise UsageError("attention is flex, which has no gradients on a CPU; use blocked, sdpa or auto")
        auto = "flex" if self.device.type == "cuda" else "blocked"
        self.attention = auto if config.attention == "auto" else config.attention
        if config.compile:
            self.run.network.compile()
        self.blocks, self.optimizer = self._spread(self.module(self.run.network, config.dropout))

    def module(self, network: DFlash | Eagle3, dropout: float = 0.0) -> Blocks | Unrolled:
        """The module that holds a network in training, on its device."""
        network = network.to(self.device)
        return Unrolled(network, dropout) if isinstance(network, Eagle3) else Blocks(network, self.attention, dropout)

    def _spread(self, blocks: Blocks | Unrolled) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module over all processes: as it is, replicated (DDP), or sharded (FSDP2, as `accelerate launch --use_fsdp` asks).

        The drafter's layers are also entered from the side, for the keys and values of the context, so it is sharded as a whole.
        """
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            if os.environ.get("FSDP_VERSION", "1") != "2":
                raise UsageError("FSDP 1 is not supported; launch with --fsdp_version 2")
            fully_shard(blocks)
        elif self.parts > 1:
            blocks = DistributedDataParallel(blocks)  # type: ignore[assignment]
        return blocks, make_optimizer(blocks, self.config)

    @contextmanager
    def _alone(self, alone: bool) -> Iterator[None]:
        """While ``alone``, a backward pass leaves its gradients in this process: the last pass of a step sends the sum."""
        if isinstance(self.blocks, FSDPModule):
            self.blocks.set_requires_gradient_sync(not alone)
            yield
        elif isinstance(self.blocks, DistributedDataParallel) and alone:
            with self.blocks.no_sync():
                yield
        else:
            yield

    @cached_property
    def features(self) -> Features:
        """Of the training documents; made at the first step, when the run folder has been checked."""
        config = self.config
        return self._features(self.run.documents.train, self.place / "features" if config.features == "disk" else config.features)

    @cached_property
    def held_out_features(self) -> Features:
        return self._features(self.run.documents.held_out, "memory")

    def _features(self, documents: Sequence[Document], place: str | Path) -> Features:
        last = self.config.kl_weight > 0 or any(document.foreign for document in documents)
        return Features(self.target, documents, self.run.network.config.taps, last, place)

    def features_bytes(self) -> int:
        """Memory or disk that the features of the training documents take."""
        return self._features(self.run.documents.train, "online").bytes()

    def step(self, number: int) -> tuple[Sums, float, float]:
        """Step ``number`` of the optimiser: its sums, gradient norm before clipping, and share of the peak learning rate.

        Raises:
            NotFinite: the loss or a gradient is none.
        """
        self.blocks.train()
        rows = self.run.batches.step(number, self.part, self.parts)
        size = self.config.micro_rows or len(rows)
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        torch.manual_seed(seed_of(self.config.seed, number, self.part))  # dropout; everything else has a generator of its own
        total: Sums | None = None
        for place, piece in enumerate(pieces):
            batch = self.run.batches.batch(piece, number // self.run.batches.steps_per_epoch).to(self.device)
            with self._alone(place < len(pieces) - 1):
                loss, sums = self.loss(self.blocks, batch, self.features, seed_of(self.config.seed, number, place))
                loss.backward()
            total = sums if total is None else total + sums
        assert total is not None
        total = Sums(self.accelerator.reduce(total.values, "sum"))
        # Processes average their gradients; the loss is a sum over all of them divided by the weight of all of them.
        scale = self.parts / max(total.weight, 1e-12)
        for parameter in self.blocks.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        clipped = nn.utils.clip_grad_norm_(self.blocks.parameters(), self.config.clip)
        norm = float(clipped.full_tensor() if isinstance(clipped, DTensor) else clipped)
        if not math.isfinite(norm) or not total.values.isfinite().all():
            raise NotFinite(*self._keys(pieces))
        rate = set_rate(self.optimizer, number, self.run.steps, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm, rate

    def loss(self, blocks: nn.Module, batch: Batch, features: Features, seed: int) -> tuple[Tensor, Sums]:
        """The sum of a batch's weighted losses, with gradients into ``blocks``, and what it tells."""
        config, block_size = self.config, self.config.block_size
        network: Any = getattr(blocks, "module", blocks).network
        batch = batch.narrowed() if isinstance(network, Eagle3) else batch
        labels, valid = batch.labels(block_size)
        tapped, last = features.rows(batch)
        if blocks.training and config.feature_noise:
            tapped = noisy(tapped, batch, len(features.taps), config.feature_noise, config.seed)
        where = (batch.anchors, batch.positions, batch.documents, block_size)
        shown = None
        if blocks.training and config.revealed:
            shown = revealed(batch, block_size, config.revealed, config.seed) & valid
            valid = valid & ~shown
        with self._autocast():
            hidden = blocks(self._embeddings(network, batch, shown).to(self.precision), tapped.to(self.precision), *where)
        words, theirs = self.run.words, None
        teacher = behind(last, batch, block_size) if last is not None else None
        if teacher is not None and bool(batch.foreign.any()):
            labels[batch.foreign] = choices(words, teacher[batch.foreign])
        known = valid  # what has a label among the words
        if isinstance(network, Eagle3):
            valid = valid & (batch.positions.gather(1, batch.anchors) > 0)[..., None]  # a first token has no features before it
            known = valid & network.t2d[labels]
            own = network.words()
            words, theirs = Words(network.lm_head.weight.to(self.precision), ids=own), words.some(own)
        elif config.vocabulary and blocks.training:
            generator = torch.Generator().manual_seed(seed)
            words = some_words(words, labels[valid], self.run.frequent, config.vocabulary, generator)
        if words.ids is not None:
            labels = torch.where(known, labels, words.ids[0])
        teacher = teacher.flatten(0, 1) if teacher is not None and config.kl_weight else None
        valid, known = valid.flatten(0, 1), known.flatten(0, 1)
        shown = shown.flatten(0, 1) if shown is not None else None
        slots = hidden[:, :, 1 - block_size :].flatten(0, 1)  # all but the anchor's own
        total, weight, entropies, correct = block_loss(slots, labels.flatten(0, 1), known, teacher, words, self.run.rule, theirs)
        return total, Sums.of(total, weight, entropies * known, correct, valid, shown)

    def _embeddings(self, network: DFlash | Eagle3, batch: Batch, shown: Tensor | None) -> Tensor:
        """What the drafter reads of the target's embedding: a DFlash's blocks, or the tokens of the rows."""
        if isinstance(network, Eagle3):
            return self.target.embed(batch.ids)
        return block_embeddings(network, self.target.embed, batch.ids, batch.anchors, self.config.block_size, shown)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def _keys(self, pieces: Sequence[Sequence[int | None]]) -> list[str]:
        """Of the conversations in these rows."""
        packed, documents = self.run.batches.packed, self.run.documents.train
        return [documents[i].key for piece in pieces for row in piece if row is not None for i in packed[row]]


def behind(last: Tensor, batch: Batch, block_size: int) -> Tensor:
    """What the head read ``[rows, anchors, block - 1, hidden]`` when the target chose each slot's token: one position earlier."""
    index = batch.anchors[..., None] + torch.arange(block_size - 1, device=last.device)
    flat = index.clamp(max=last.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, last.shape[-1])
    return last.gather(1, flat).view(*index.shape, -1)
