"""The runner: every method answers every prompt, interleaved and in random order, and the figures are made of paired ratios."""

import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from blockdraft.bench.methods import Answer, Method
from blockdraft.bench.tasks import Conversation, Task
from blockdraft.prompts import encode
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target

RESAMPLES = 2000
PACKAGES = ("blockdraft", "torch", "transformers", "numpy")


@dataclass
class Measured:
    """All answers of one method to one task.

    Attributes:
        answers: for each prompt (a turn of a conversation) its repeats.
        batches: for each batch of prompts its repeats, as seconds of decoding and tokens after the first ones.
    """

    answers: list[list[Answer]] = field(default_factory=list)
    batches: list[list[tuple[float, int]]] = field(default_factory=list)

    def add(self, batch: list[list[Answer]]) -> None:
        """A batch: for each prompt its repeats."""
        self.answers += batch
        repeats = zip(*batch, strict=True)
        self.batches.append([(sum(a.wall_seconds for a in r), sum(max(0, len(a.ids) - 1) for a in r)) for r in repeats])


def run(
    target: Target,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    params: SamplingParams,
    batch: int,
    repeats: int,
    seed: int,
    note: Callable[[int], None],
    results: list[dict[str, Any]],
    keep: Callable[[], None],
) -> None:
    """Measure: one result per task and method, as in the JSON.

    Args:
        note: called with the number of answers so far.
        results: of the tasks that are done; those of the others are added, task by task.
        keep: called when a task's results are in.

    Raises:
        UsageError, BlockdraftError: from a method.
    """
    finished = {result["task"] for result in results}
    tasks = [task for task in tasks if task.name not in finished]
    firsts = (encode(target, conversation[0]) for task in tasks for conversation in task.conversations)
    fitting = list(islice((ids for ids in firsts if len(ids) + 1 < target.context), batch))
    for method in methods if fitting else ():  # first calls create kernels, and measure costs: keep them out
        short = SamplingParams(**{**vars(params), "max_new_tokens": min(24, params.max_new_tokens), "ignore_eos": True})
        method.answer(fitting, short)
    done = 0
    for task in tasks:
        order = random.Random(f"{seed}/{task.name}")  # the same one whether the run was interrupted or not
        measured = {method.name: Measured() for method in methods}
        for group in _groups(task.conversations, batch):
            # Each method goes on with its own answers; lossless ones have the same.
            histories = {method.name: [[] for _ in group] for method in methods}  # type: ignore[var-annotated]
            for turn in range(max(len(conversation) for conversation in group)):
                rows = [i for i, conversation in enumerate(group) if turn < len(conversation)]
                for history in histories.values():
                    for i in rows:
                        history[i] += group[i][turn]
                rows = [i for i in rows if _room(target, [history[i] for history in histories.values()], task.name)]
                if not rows:
                    continue
                found: dict[str, list[list[Answer]]] = {method.name: [[] for _ in rows] for method in methods}
                for _ in range(repeats):
                    for method in order.sample(list(methods), len(methods)):
                        prompts = [encode(target, histories[method.name][i]) for i in rows]
                        for place, answer in enumerate(method.answer(prompts, params)):
                            found[method.name][place].append(answer)
                        done += len(rows)
                        note(done)
                for name, answers in found.items():
                    measured[name].add(answers)
                    for place, i in enumerate(rows):
                        histories[name][i].append({"role": "assistant", "content": answers[place][0].text})
        if any(found.answers for found in measured.values()):
            results += summarise(target, task, methods, measured, seed)
            keep()
        else:
            print(f"blockdraft: no prompt of {task.name} fits into {target.context} tokens; nothing measured", file=sys.stderr)


def _room(target: Target, histories: list[list[dict[str, str]]], task: str) -> bool:
    """Whether a turn leaves room for an answer, whichever method's answers stand before it; says so if it does not."""
    longest = max(len(encode(target, history)) for history in histories)
    if longest + 1 < target.context:
        return True
    print(f"blockdraft: a prompt of {task} with {longest} tokens leaves no room in {target.context}; left out", file=sys.stderr)
    return False


def _groups(conversations: Sequence[Conversation], size: int) -> list[Sequence[Conversation]]:
    return [conversations[start : start + size] for start in range(0, len(conversations), size)]


def summarise(
    target: Target, task: Task, methods: Sequence[Method], measured: dict[str, Measured], seed: int
) -> list[dict[str, Any]]:
    """One result per method."""
    plain = measured.get("ar")
    return [
        {
            "task": task.name,
            "source": task.source,
            "method": method.name,
            **figures(measured[method.name], plain, method.drafted, seed),
            "model_bytes": method.model_bytes,
            "extra_bytes": method.extra_bytes,
        }
        for method in methods
    ]


def figures(measured: Measured, plain: Measured | None, drafted: bool, seed: int) -> dict[str, Any]:
    """Everything that answers tell; times are medians over repeats, rates and shares are pooled over prompts."""
    first = [repeats[0] for repeats in measured.answers]
    decode = sum(statistics.median(seconds for seconds, _ in repeats) for repeats in measured.batches)
    decoded = sum(statistics.median(count for _, count in repeats) for repeats in measured.batches)
    start = [statistics.median(a.first_seconds for a in repeats) for repeats in measured.answers]
    prompts = sum(statistics.median(a.first_seconds - a.waited_seconds for a in repeats) for repeats in measured.answers)
    tokens, rounds = sum(len(a.ids) for a in first), sum(a.rounds for a in first)
    behind = sum(max(0, len(a.ids) - 1) for a in first)  # tokens after the first one, whose time is the prompt's
    accepted = [count for a in first for count in a.accepted]
    deepest = max(accepted, default=0)
    shares = [sum(count >= depth for count in accepted) / len(accepted) for depth in range(1, deepest + 1)] if accepted else []
    speedup, low, high = _speedup(measured, plain, seed)
    return {
        "prompts": len(first),
        "new_tokens": tokens,
        "rounds": rounds if drafted else 0,
        "plain_rounds": sum(a.plain_rounds for a in first) if drafted else 0,
        "acceptance_length": behind / rounds if drafted and rounds else None,
        "acceptance_by_position": shares if drafted else None,
        "first_slot_acceptance": (shares[0] if shares else 0.0) if drafted and accepted else None,
        "accepted_lengths": [accepted.count(n) for n in range(deepest + 1)] if drafted else None,
        "tokens_per_second": decoded / decode if decode > 0 else None,
        "end_to_end_tokens_per_second": tokens / (decode + prompts),
        "time_to_first_token_s": statistics.median(start),
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "identical_to_ar": _identical(measured, plain),
        "time_split": _split(measured, rounds) if drafted and rounds else None,
    }


def _per_token(repeats: Sequence[tuple[float, int]]) -> float | None:
    times = [seconds / tokens for seconds, tokens in repeats if tokens]
    return statistics.median(times) if times else None


def _speedup(measured: Measured, plain: Measured | None, seed: int) -> tuple[float | None, float | None, float | None]:
    """Median over prompts (batches) of the paired ratio of time per token, with a bootstrap interval of 95 %; one pair has none."""
    if plain is None:
        return None, None, None
    pairs = [(_per_token(a), _per_token(b)) for a, b in zip(plain.batches, measured.batches, strict=True)]
    ratios = [slow / fast for slow, fast in pairs if slow and fast]
    if not ratios:
        return None, None, None
    if len(ratios) == 1:
        return ratios[0], None, None
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def _identical(measured: Measured, plain: Measured | None) -> float | None:
    if plain is None:
        return None
    same = [a[0].ids == b[0].ids for a, b in zip(plain.answers, measured.answers, strict=True)]
    return sum(same) / len(same)


def _split(measured: Measured, rounds: int) -> dict[str, float] | None:
    """Seconds per round in the drafter, in the target, and between them."""
    first = [repeats[0] for repeats in measured.answers]
    if any(a.round_seconds is None for a in first if a.accepted):
        return None
    sums = (sum(getattr(a, f"{name}_seconds") or 0.0 for a in first) for name in ("draft", "verify", "round"))
    draft, verify, whole = (seconds / rounds for seconds in sums)
    return {"draft": draft, "verify": verify, "other": whole - draft - verify}


def environment(target: Target) -> dict[str, Any]:
    """What the figures were measured on."""
    flags = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in _flags()]
    cuda = target.device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(target.device) if cuda else _processor(),
        "cpu_flags": flags,
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kernels": target.kernels,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": revision(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    line = next((x for x in info.read_text().split("\n") if x.startswith("flags")), "") if info.exists() else ""
    return line.split()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor() or platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def revision() -> str | None:
    """Of the source tree this runs from; None for an installed package, also where it lies within another project's tree."""
    this = Path(__file__).resolve()
    git = ["git", "-C", str(this.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", this.name], capture_output=True, check=True)
        run = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None
