"""Curves of a run from its ``metrics.jsonl``."""

import json
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.files import write_whole


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run.

    Raises:
        UsageError: no run, or nothing measured yet.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UsageError(f"{folder} is no run folder: it has no metrics.jsonl")
    entries = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    if not any("loss" in entry for entry in entries):
        raise UsageError(f"{path} has no step yet; wait for the first {path.name} line with a loss")
    return entries


def plot(folder: Path, out: Path) -> Path:
    """Draw loss, accuracy by slot, and acceptance length (training estimate, held-out estimate, real) into a PNG.

    Raises:
        UsageError: no run, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plot needs matplotlib; install it with `pip install blockdraft[plot]`") from None
    entries = read_metrics(folder)
    steps = [entry for entry in entries if "loss" in entry]
    looks = [entry for entry in entries if "real_tau" in entry]
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    loss, slots, tau = figure.subplots(1, 3)
    x = [entry["step"] for entry in steps]
    loss.plot(x, [entry["loss"] for entry in steps], label="training", linewidth=1)
    loss.set(title="Loss per unit of weight", xlabel="step")
    at = [look["step"] for look in looks]
    if looks:
        loss.plot(at, [look["held_out"]["loss"] for look in looks], "o-", label="held out")
    loss.legend()
    for slot in range(len(steps[0]["accuracy"])):
        shade = 0.85 - 0.7 * slot / max(1, len(steps[0]["accuracy"]) - 1)
        slots.plot(x, [entry["accuracy"][slot] for entry in steps], color=(0.1, shade, 0.6), linewidth=1, label=f"slot {slot + 1}")
    slots.set(title="Share of right drafts by slot, in training", xlabel="step", ylim=(0, 1))
    slots.legend(fontsize="small", ncols=2)
    tau.plot(x, [entry["estimated_tau"] for entry in steps], linewidth=1, label="training estimate")
    if looks:
        tau.plot(at, [look["held_out"]["estimated_tau"] for look in looks], "o-", label="held-out estimate")
        tau.plot(at, [look["real_tau"] for look in looks], "s-", label="real decoding, held-out prompts")
    tau.set(title="Acceptance length: tokens per round", xlabel="step")
    tau.legend()
    for axes in (loss, slots, tau):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    write_whole(out, lambda path: figure.savefig(path, format="png", dpi=120))
    return out
