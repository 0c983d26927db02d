"""The trainer: a loop of steps in a run folder, and what is watched and kept on the way.

    each step: rows -> features of the frozen target -> blocks through the drafter -> loss -> gradients -> optimiser
    now and then: evaluate on held-out conversations, store a checkpoint

Gradients are sums until the end of a step: they are divided once, by the weight of the *global* batch, so that splitting a batch
over passes or processes changes nothing (but for dropout and the sample of a reduced vocabulary, which each pass draws for itself).
"""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from blockdraft.drafters.dflash import DFlash
from blockdraft.drafters.eagle3 import Eagle3
from blockdraft.engine.memory import available_memory, keep_freed_memory
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.progress import Progress
from blockdraft.store import lock, write_whole
from blockdraft.training.batches import Batch, Batches, Document, seed_of
from blockdraft.training.blocks import Blocks, block_embeddings
from blockdraft.training.card import measure, write_drafter
from blockdraft.training.checkpoint import Checkpoints
from blockdraft.training.config import TrainConfig
from blockdraft.training.evaluate import as_drafter, decode_held_out, fresh, spread
from blockdraft.training.features import Features
from blockdraft.training.loss import Words, block_loss, choices, some_words
from blockdraft.training.metrics import Sums
from blockdraft.training.optimizer import make_optimizer, set_rate
from blockdraft.training.run import precision_of, prepare
from blockdraft.training.unrolled import Unrolled

# Keys that may change when a run goes on: they decide what is shown and kept, not what is trained.
FREE = frozenset(
    (
        "out log_every evaluate_every evaluate_prompts evaluate_tokens checkpoint_every keep trackers features shortlist thinking"
    ).split()
)
ESTIMATE_ANCHORS = 16  # blocks of a held-out row: enough for two digits
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Trainer:
    """One run.

    Args:
        config: the recipe.

    Attributes:
        step: steps done.
        best: the step with the best real tau so far, and that tau.

    Raises:
        UsageError: anything in the config that does not fit target, corpus, machine or run folder.
    """

    def __init__(self, config: TrainConfig):
        if not config.out:
            raise UsageError("no run folder: name one with out=FOLDER")
        self.config, self.out = config, Path(config.out).expanduser()
        refuse_trackers(config.trackers)
        keep_freed_memory()
        self.accelerator = Accelerator(cpu=config.device == "cpu", log_with=config.trackers or None, project_dir=str(self.out))
        self.parts, self.part = self.accelerator.num_processes, self.accelerator.process_index
        if self.parts > 1 and config.device not in (None, "cpu"):
            raise UsageError(f"device is {config.device}; accelerate gives each of {self.parts} processes its own: leave it out")
        if config.rows % self.parts:
            raise UsageError(f"rows is {config.rows}; with {self.parts} processes it must be a multiple of {self.parts}")
        self.run = prepare(config, str(self.accelerator.device))
        self.target, self.device = self.run.target, self.run.target.device
        self.precision = precision_of(config, self.device)
        if config.attention == "flex" and self.device.type == "cpu":
            raise UsageError("attention is flex, which has no gradients on a CPU; use blocked, sdpa or auto")
        auto = "flex" if self.device.type == "cuda" else "blocked"
        self.attention = auto if config.attention == "auto" else config.attention
        if config.compile:
            self.run.network.compile()
        self.blocks, self.optimizer = self._spread(self._trained(self.run.network, config.dropout))
        self.checkpoints = Checkpoints(self.out, config.keep)
        self.step, self.worse = 0, 0
        self.best: tuple[int, float] | None = None

    def _trained(self, network: DFlash | Eagle3, dropout: float = 0.0) -> Blocks | Unrolled:
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
        return self._features(self.run.documents.train, self.out / "features" if config.features == "disk" else config.features)

    @cached_property
    def held_out_features(self) -> Features:
        return self._features(self.run.documents.held_out, "memory")

    def _features(self, documents: Sequence[Document], place: str | Path) -> Features:
        last = self.config.kl_weight > 0 or any(document.foreign for document in documents)
        return Features(self.target, documents, self.run.network.config.taps, last, place)

    def _features_bytes(self) -> int:
        return self._features(self.run.documents.train, "online").bytes()

    # ---- the loop

    def train(self) -> Path | None:
        """Run to the end, from the newest checkpoint if there is one. Returns the drafter's folder (on the main process).

        Raises:
            UsageError: the run folder is of another config or corpus, or the disk is too full for checkpoints.
            BlockdraftError: the loss or a gradient is not a finite number; names step, conversations and the last checkpoint.
        """
        self._enter()
        window, began = None, time.perf_counter()
        with self._locked(), Progress("Training", self.run.steps, on=self.main) as progress, self._interruptible() as asked:
            while self.step < self.run.steps and not self._stale():
                if asked:
                    self._save()
                    raise KeyboardInterrupt
                sums, norm, rate = self._step()
                window = sums if window is None else window + sums
                self.step += 1
                if self.step % self.config.log_every == 0 or self.step == self.run.steps:
                    seconds = time.perf_counter() - began
                    figures = window.figures()
                    figures |= {
                        "blocks_per_second": figures["blocks"] / seconds,
                        "gradient_norm": norm,
                        "rate": rate,
                        "processes": self.parts,
                    }
                    self._note(figures)
                    progress.note(_line(figures, self.best))
                    window, began = None, time.perf_counter()
                progress.update(self.step)
                self._look_and_keep()
                if window is None:
                    began = time.perf_counter()
        self.accelerator.end_training()
        return self._finish() if self.main else None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The run folder is this run's while it trains."""
        if not self.main:
            yield
            return
        with lock(self.out / ".lock", f"another process trains in {self.out}; wait for it, or take another out"):
            yield

    @contextmanager
    def _interruptible(self) -> Iterator[list[int]]:
        """Ctrl-C and SIGTERM fill the list, and the loop stores a checkpoint before it ends; the second one ends it at once.

        Of several processes, some could be a step ahead: there the signals do what they always do.
        """
        asked: list[int] = []
        if self.parts > 1 or threading.current_thread() is not threading.main_thread():
            yield asked
            return

        def note(number: int, frame: object) -> None:
            asked.append(number)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stale(self) -> bool:
        return self.config.patience is not None and self.worse >= self.config.patience

    def _step(self) -> tuple[Sums, float, float]:
        """One step of the optimiser: its sums, gradient norm before clipping, and share of the peak learning rate."""
        self.blocks.train()
        rows = self.run.batches.step(self.step, self.part, self.parts)
        size = self.config.micro_rows or len(rows)
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        torch.manual_seed(seed_of(self.config.seed, self.step, self.part))  # dropout; everything else has a generator of its own
        total: Sums | None = None
        for number, piece in enumerate(pieces):
            batch = self.run.batches.batch(piece, self.step // self.run.batches.steps_per_epoch).to(self.device)
            with self._alone(number < len(pieces) - 1):
                loss, sums = self.loss(self.blocks, batch, self.features, seed_of(self.config.seed, self.step, number))
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
            self._stop(pieces)
        rate = set_rate(self.optimizer, self.step, self.run.steps, self.config)
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
        teacher = _behind(last, batch, block_size) if last is not None else None
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

    def _stop(self, pieces: Sequence[Sequence[int | None]]) -> None:
        packed, documents = self.run.batches.packed, self.run.documents.train
        keys = [documents[i].key for piece in pieces for row in piece if row is not None for i in packed[row]]
        steps = self.checkpoints.steps()
        last = (
            f"the last good checkpoint is step {steps[-1]} in {self.checkpoints.folder}" if steps else "there is no checkpoint yet"
        )
        raise BlockdraftError(
            f"step {self.step}: the loss or its gradient is not a finite number; conversations {', '.join(keys)}; {last}; "
            "a lower learning_rate, or precision=float32, may help"
        )

    # ---- watching and keeping

    @property
    def main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def _look_and_keep(self) -> None:
        last = self.step == self.run.steps
        looked = last or self.step % self.config.evaluate_every == 0
        if looked:
            self._evaluate()
        if looked or self.step % self.config.checkpoint_every == 0:
            self._save()

    def _evaluate(self) -> None:
        """The estimate on held-out conversations and the real tau on their prompts, by the main process for all."""
        weights, _ = get_state_dict(self.blocks, [], options=WHOLE)
        tau: list[Any] = [None]
        if self.main:
            bare = _bare(weights)
            drafter = as_drafter(self.run.network, bare, self.target)
            held_out = [document for document in self.run.documents.held_out if not document.foreign]
            real = decode_held_out(
                self.target, drafter, spread(held_out, self.config.evaluate_prompts), self.config.evaluate_tokens
            )
            tau = [real.tau]
            estimate = self._estimate(bare)
            self._note({"held_out": estimate, "real_tau": real.tau, "real_first_slot": real.first_slot})
            told = f"tau {real.tau:.3f} in real decoding" if real.tau else "no held-out answer to decode"
            print(
                f"blockdraft: step {self.step}: {told} (estimate on held-out conversations {estimate['estimated_tau']:.3f})",
                file=sys.stderr,
            )
        broadcast_object_list(tau)
        if tau[0] is None:  # text alone: the newest weights are the best that is known
            self.best = (self.step, 0.0)
        elif self.best is None or tau[0] > self.best[1]:
            self.best, self.worse = (self.step, float(tau[0])), 0
        else:
            self.worse += 1

    def _estimate(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Figures of held-out blocks, always the same ones, over the whole vocabulary."""
        blocks = self._trained(fresh(self.run.network, weights)).eval()
        c = self.config
        rows = c.micro_rows or c.rows
        held_out = Batches(self.run.documents.held_out, c.sequence_length, min(c.anchors, ESTIMATE_ANCHORS), rows, c.seed)
        total: Sums | None = None
        with torch.no_grad():
            for step in range(held_out.steps_per_epoch):
                batch = held_out.batch(held_out.step(step), 0).to(self.device)
                _, sums = self.loss(blocks, batch, self.held_out_features, 0)
                total = sums if total is None else total + sums
        assert total is not None
        return total.figures()

    def _note(self, figures: dict[str, Any]) -> None:
        if not self.main:
            return
        entry = {"step": self.step, "epoch": round(self.step / self.run.batches.steps_per_epoch, 4), **figures}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self.config.trackers:
            self.accelerator.log({k: v for k, v in _flat(figures).items() if isinstance(v, (int, float))}, step=self.step)

    def _save(self) -> None:
        network, optimizer = get_state_dict(self.blocks, self.optimizer, options=WHOLE)
        self.features.flush()
        if self.main:
            state = {"best": self.best, "worse": self.worse, "documents_sha256": self.run.digest}
            self.checkpoints.save(self.step, _bare(network), optimizer, state, self.best and self.best[0])
            if self.best is None or self.best[0] == self.step:  # before the first look the newest one: a run cut short leaves one
                write_drafter(self.run, self.out / "drafter", _bare(network), self.step, self._judged)
        self.accelerator.wait_for_everyone()

    # ---- beginning and end

    def _enter(self) -> None:
        """Make the run folder, or go on from its newest checkpoint."""
        values = asdict(self.config)
        manifest = self.out / "config.yaml"
        if manifest.exists():
            # A run begun before a field existed ran with what is now that field's default.
            found = asdict(TrainConfig()) | yaml.safe_load(manifest.read_text())
            differing = [key for key in values if key not in FREE and found.get(key) != values[key]]
            if differing:
                key = differing[0]
                raise UsageError(
                    f"{self.out} holds a run with {key} {found.get(key)!r} instead of {values[key]!r}; take another out"
                )
        steps = self.checkpoints.steps()
        if steps:
            network, optimizer, state = self.checkpoints.load(steps[-1])
            if state["documents_sha256"] != self.run.digest:
                raise UsageError(
                    f"the corpus has changed since {self.out} began, and so has the order of its batches; start another run "
                    f"with init={self.out / 'drafter'}"
                )
            prefixed: dict[str, Any] = {f"network.{name}": tensor for name, tensor in network.items()}
            set_state_dict(self.blocks, self.optimizer, model_state_dict=prefixed, optim_state_dict=optimizer, options=WHOLE)
            self.step, self.worse = int(state["step"]), int(state["worse"])
            self.best = tuple(state["best"]) if state["best"] else None
        self._refuse_full_memory()
        if self.main:
            self._refuse_full_disk()
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(manifest, lambda path: path.write_text(yaml.safe_dump(values, sort_keys=False)))
            self._forget_behind()
        if self.config.trackers:
            self.accelerator.init_trackers("blockdraft", {key: str(value) for key, value in values.items()})
        self.accelerator.wait_for_everyone()

    def _refuse_full_disk(self) -> None:
        parameters = sum(p.numel() for p in self.run.network.parameters())
        place = next(folder for folder in (self.out, *self.out.resolve().parents) if folder.exists())
        needed, free = 12 * parameters * (self.config.keep + 2), shutil.disk_usage(place).free
        if self.config.features == "disk" and not (self.out / "features" / "features.json").exists():
            needed += self._features_bytes()
        if needed > free:
            what = "checkpoints and features" if self.config.features == "disk" else "checkpoints"
            raise UsageError(f"{what} take {needed / 1e9:.2f} GB, {place} has {free / 1e9:.2f} GB free; use another out")

    def _refuse_full_memory(self) -> None:
        needed, free = self._features_bytes(), available_memory()
        if self.config.features == "memory" and needed > 0.8 * free:
            raise UsageError(
                f"features take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free; use features=disk or online"
            )

    def _forget_behind(self) -> None:
        """Lines of metrics behind the checkpoint belong to steps that a kill undid."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        write_whole(path, lambda beside: beside.write_text("".join(line + "\n" for line in kept)))

    @property
    def _judged(self) -> bool:
        """Whether the best step is one by acceptance length: before the first look, or with text alone, it is the newest."""
        return self.best is not None and self.best[1] > 0

    def _finish(self) -> Path:
        """Write the best drafter, with its card."""
        assert self.best is not None or self.checkpoints.steps()
        step = self.best[0] if self.best else self.checkpoints.steps()[-1]
        weights, _, _ = self.checkpoints.load(step)
        folder = self.out / "drafter"
        write_drafter(self.run, folder, weights, step, self._judged)
        return write_drafter(self.run, folder, weights, step, self._judged, measure(self.run, folder))


def refuse_trackers(names: Sequence[str]) -> None:
    """Raise UsageError for a tracker that accelerate does not know, or whose package is not installed."""
    known = [str(kind) for kind in LoggerType if kind != LoggerType.ALL]
    there = [str(kind) for kind in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UsageError(f"tracker {name!r} is unknown; use {', '.join(known)}")
        if name not in there:
            raise UsageError(f"tracker {name!r} is not installed; install its package, or leave it out of trackers")


def noisy(features: Tensor, batch: Batch, taps: int, share: float, seed: int) -> Tensor:
    """Features ``[rows, length, taps * hidden]`` with uniform noise of up to ``share`` standard deviations of each tap.

    A row's noise is a function of seed, epoch and row alone, and so is its scale: however a batch is split, it is the same.
    """
    out = torch.empty_like(features)
    for row, key in enumerate(batch.keys):
        split = features[row].float().unflatten(-1, (taps, -1))  # [length, taps, hidden]
        there = batch.documents[row] >= 0
        spread = split[there].std(dim=(0, 2), keepdim=True) if bool(there.any()) else split[:1, :, :1] * 0
        generator = torch.Generator(features.device).manual_seed(seed_of(seed, *key))
        noise = torch.rand(split.shape, generator=generator, device=features.device) * 2 - 1
        out[row] = (split + noise * spread * share).flatten(-2).to(features.dtype)
    return out


def revealed(batch: Batch, block_size: int, share: float, seed: int) -> Tensor:
    """Which slots of which blocks are shown, bool ``[rows, anchors, block - 1]``: none, or each with a chance of its block's own.

    A function of seed, epoch and row, like the noise.
    """
    rows = []
    for key in batch.keys:
        generator = torch.Generator().manual_seed(seed_of(seed, *key, 1))
        chosen, chance = torch.rand(2, batch.anchors.shape[1], 1, generator=generator)
        rows.append((chosen < share) & (torch.rand(batch.anchors.shape[1], block_size - 1, generator=generator) < chance))
    return torch.stack(rows).to(batch.ids.device)


def _behind(last: Tensor, batch: Batch, block_size: int) -> Tensor:
    """What the head read ``[rows, anchors, block - 1, hidden]`` when the target chose each slot's token: one position earlier."""
    index = batch.anchors[..., None] + torch.arange(block_size - 1, device=last.device)
    flat = index.clamp(max=last.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, last.shape[-1])
    return last.gather(1, flat).view(*index.shape, -1)


def _bare(weights: dict[str, Any]) -> dict[str, Tensor]:
    """The drafter's own names, float32 (ids as they are), on the CPU."""
    tensors = {name.removeprefix("network."): tensor.detach().cpu() for name, tensor in weights.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _flat(figures: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat |= {f"{prefix}{key}/{place}": entry for place, entry in enumerate(value, 1)}
        else:
            flat[prefix + key] = value
    return flat


def _line(figures: dict[str, Any], best: tuple[int, float] | None) -> str:
    estimate = figures["estimated_tau"]  # None where every block showed something
    parts = [
        f"loss {figures['loss']:.3f}",
        *([f"estimate {estimate:.2f}"] if estimate is not None else []),
        f"{figures['blocks_per_second']:.0f} blocks/s",
    ]
    return "  ".join([*parts, f"tau {best[1]:.2f}"] if best else parts)
