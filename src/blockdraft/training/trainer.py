"""The trainer: a loop of steps in a run folder, and what is watched and kept on the way.

Each step is the learner's (``learner.py``); now and then the drafter is looked at on held-out
conversations, and a checkpoint is stored.
"""

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, broadcast_object_list
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from blockdraft.engine.memory import available_memory, keep_freed_memory
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.files import lock, write_whole
from blockdraft.progress import Progress
from blockdraft.training.card import measure, write_drafter
from blockdraft.training.checkpoint import Checkpoints
from blockdraft.training.config import TrainConfig
from blockdraft.training.evaluate import as_drafter, decode_held_out, estimate, spread
from blockdraft.training.learner import Learner, NotFinite
from blockdraft.training.metrics import Sums

# Keys that may change when a run goes on: they decide what is shown and kept, not what is trained.
FREE = frozenset(
    (
        "out log_every evaluate_every evaluate_prompts evaluate_tokens checkpoint_every keep trackers features shortlist thinking"
    ).split()
)
# Keys of which a branch has its own: its end, how the rate comes down, and where it came from.
BRANCHING = FREE | frozenset("branch schedule warmup decay floor max_steps epochs patience init".split())
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
        self.parts = self.accelerator.num_processes
        if self.parts > 1 and config.device not in (None, "cpu"):
            raise UsageError(f"device is {config.device}; accelerate gives each of {self.parts} processes its own: leave it out")
        if config.rows % self.parts:
            raise UsageError(f"rows is {config.rows}; with {self.parts} processes it must be a multiple of {self.parts}")
        self.learner = Learner(config, self.accelerator, self.out)
        self.run, self.target, self.device = self.learner.run, self.learner.target, self.learner.device
        self.checkpoints = Checkpoints(self.out, config.keep)
        self.step, self.worse = 0, 0
        self.best: tuple[int, float] | None = None

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
                        "precision": str(self.learner.precision).removeprefix("torch."),
                        "target_dtype": str(self.target.dtype).removeprefix("torch."),
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
        """The next step of the learner."""
        try:
            return self.learner.step(self.step)
        except NotFinite as error:
            steps = self.checkpoints.steps()
            last = f"the last good checkpoint is step {steps[-1]} in {self.checkpoints.folder}" if steps else ""
            raise BlockdraftError(
                f"step {self.step}: the loss or its gradient is not a finite number; conversations {', '.join(error.args)}; "
                f"{last or 'there is no checkpoint yet'}; a lower learning_rate, or precision=float32, may help"
            ) from None

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
        weights, _ = get_state_dict(self.learner.blocks, [], options=WHOLE)
        tau: list[Any] = [None]
        if self.main:
            bare = _bare(weights)
            drafter = as_drafter(self.run.network, bare, self.target)
            held_out = [document for document in self.run.documents.held_out if not document.foreign]
            real = decode_held_out(
                self.target, drafter, spread(held_out, self.config.evaluate_prompts), self.config.evaluate_tokens
            )
            tau = [real.tau]
            figures = estimate(self.learner, bare)
            self._note({"held_out": figures, "real_tau": real.tau, "real_first_slot": real.first_slot})
            told = f"tau {real.tau:.3f} in real decoding" if real.tau else "no held-out answer to decode"
            print(
                f"blockdraft: step {self.step}: {told} (estimate on held-out conversations {figures['estimated_tau']:.3f})",
                file=sys.stderr,
            )
        broadcast_object_list(tau)
        if tau[0] is None:  # text alone: the newest weights are the best that is known
            self.best = (self.step, 0.0)
        elif self.best is None or tau[0] > self.best[1]:
            self.best, self.worse = (self.step, float(tau[0])), 0
        else:
            self.worse += 1

    def _note(self, figures: dict[str, Any]) -> None:
        if not self.main:
            return
        entry = {"step": self.step, "epoch": round(self.step / self.run.batches.steps_per_epoch, 4), **figures}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self.config.trackers:
            self.accelerator.log({k: v for k, v in _flat(figures).items() if isinstance(v, (int, float))}, step=self.step)

    def _save(self) -> None:
        network, optimizer = get_state_dict(self.learner.blocks, self.learner.optimizer, options=WHOLE)
        self.learner.features.flush()
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
            self._refuse_another_recipe(manifest, FREE)
        if self.checkpoints.steps():
            state = self._take(self.checkpoints)
            self.worse, self.best = int(state["worse"]), tuple(state["best"]) if state["best"] else None
        elif self.config.branch is not None:
            self._branch(Path(self.config.branch).expanduser())
        self._refuse_full_memory()
        if self.main:
            self._refuse_full_disk()
            self.out.mkdir(parents=True, exist_ok=True)
            write_whole(manifest, lambda path: path.write_text(yaml.safe_dump(values, sort_keys=False)))
            self._forget_behind()
        if self.config.trackers:
            self.accelerator.init_trackers("blockdraft", {key: str(value) for key, value in values.items()})
        self.accelerator.wait_for_everyone()

    def _branch(self, trunk: Path) -> None:
        """Begin where another run is now, on the way to an end of our own."""
        checkpoints = Checkpoints(trunk, self.config.keep)
        if not checkpoints.steps():
            raise UsageError(f"branch is {trunk}, which has no checkpoint; name the folder of a run that has one")
        self._refuse_another_recipe(trunk / "config.yaml", BRANCHING)
        self._take(checkpoints)
        if self.step >= self.run.steps:
            raise UsageError(
                f"branch {trunk} is at step {self.step} already, and this run ends at {self.run.steps}: give more max_steps"
            )

    def _take(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """Weights, optimiser and step of the newest checkpoint; returns what else it holds."""
        network, optimizer, state = checkpoints.load(checkpoints.steps()[-1])
        run = checkpoints.folder.parent
        if state["documents_sha256"] != self.run.digest:
            raise UsageError(
                f"the corpus has changed since {run} began, and so has the order of its batches; start another run "
                f"with init={run / 'drafter'}"
            )
        weights: dict[str, Any] = {f"network.{name}": tensor for name, tensor in network.items()}
        blocks, optimizers = self.learner.blocks, self.learner.optimizer
        set_state_dict(blocks, optimizers, model_state_dict=weights, optim_state_dict=optimizer, options=WHOLE)
        self.step = int(state["step"])
        return dict(state)

    def _refuse_another_recipe(self, manifest: Path, free: frozenset[str]) -> None:
        """Hold a run's recipe against this one but for ``free`` keys."""
        values = asdict(self.config)
        # A run begun before a field existed ran with what is now that field's default.
        found = asdict(TrainConfig()) | yaml.safe_load(manifest.read_text())
        differing = [key for key in values if key not in free and found.get(key) != values[key]]
        if differing:
            key = differing[0]
            raise UsageError(
                f"{manifest.parent} holds a run with {key} {found.get(key)!r} instead of {values[key]!r}; take another out"
                + (" or branch" if free is BRANCHING else "")
            )

    def _refuse_full_disk(self) -> None:
        parameters = sum(p.numel() for p in self.run.network.parameters())
        place = next(folder for folder in (self.out, *self.out.resolve().parents) if folder.exists())
        needed, free = 12 * parameters * (self.config.keep + 2), shutil.disk_usage(place).free
        if self.config.features == "disk" and not (self.out / "features" / "features.json").exists():
            needed += self.learner.features_bytes()
        if needed > free:
            what = "checkpoints and features" if self.config.features == "disk" else "checkpoints"
            raise UsageError(f"{what} take {needed / 1e9:.2f} GB, {place} has {free / 1e9:.2f} GB free; use another out")

    def _refuse_full_memory(self) -> None:
        needed, free = self.learner.features_bytes(), available_memory()
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
