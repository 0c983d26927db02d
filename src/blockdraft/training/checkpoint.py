"""Checkpoints: whole or absent, found by themselves, the newest few and the best kept.

A checkpoint is a folder ``step-00000500`` with the drafter (``model.safetensors``, float32), the optimiser (``optimizer.pt``)
and ``state.json``. It is made beside its place and renamed into it. Nothing random is stored: every draw of a run is a function
of seed and step.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.errors import BlockdraftError
from blockdraft.files import fsync


class Checkpoints:
    """The checkpoints of a run folder.

    Args:
        folder: of the run; made when the first checkpoint is saved.
        keep: newest ones to keep.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder / "checkpoints", keep

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        found = self.folder.glob("step-*/state.json") if self.folder.exists() else []
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(
        self, step: int, network: dict[str, Tensor], optimizer: dict[str, Any], state: dict[str, Any], best: int | None
    ) -> None:
        """Store a step, then delete what is neither among the newest nor the best.

        Raises:
            BlockdraftError: it cannot be written; the ones before it stay.
        """
        beside = self.folder / f".step-{step:08d}"
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            save_file({name: tensor.contiguous() for name, tensor in network.items()}, beside / "model.safetensors")
            torch.save(optimizer, beside / "optimizer.pt")
            (beside / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
            for path in (*beside.iterdir(), beside):
                fsync(path)
            shutil.rmtree(self._place(step), ignore_errors=True)
            os.rename(beside, self._place(step))
            fsync(self.folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise BlockdraftError(f"cannot store the checkpoint of step {step} in {self.folder}: {reason}") from error
        for old in self.steps()[: -self.keep]:
            if old != best:
                shutil.rmtree(self._place(old))

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        """Drafter, optimiser and state of a step.

        Raises:
            BlockdraftError: it is damaged.
        """
        place = self._place(step)
        try:
            state = json.loads((place / "state.json").read_text())
            optimizer = torch.load(place / "optimizer.pt", map_location="cpu", weights_only=True)
            return load_file(place / "model.safetensors"), optimizer, state
        except Exception as error:
            raise BlockdraftError(f"the checkpoint {place} is damaged: {error}; delete it to go on from the one before") from error

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"
