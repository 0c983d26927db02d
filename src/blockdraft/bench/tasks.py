"""Tasks: prompts to measure with, from the hub, from a folder, or our own.

The six tasks and their prompt formats are those of the DFlash benchmarks (z-lab/dflash ``benchmark.py``).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.prompts import OWN_PROMPTS, Message, read_prompts

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
Conversation = list[list[Message]]


@dataclass(frozen=True)
class Dataset:
    """Where a task lives on the hub, and the user turns of one of its rows."""

    name: str
    split: str
    turns: Callable[[dict[str, Any]], list[str]]
    config: str | None = None


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "test", lambda row: [row["question"] + REASON], "main"),
    "math500": Dataset("HuggingFaceH4/MATH-500", "test", lambda row: [row["problem"] + REASON]),
    "humaneval": Dataset("openai/openai_humaneval", "test", lambda row: [f"{HUMANEVAL}\n```python\n{row['prompt']}\n```"]),
    "mbpp": Dataset("google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], "sanitized"),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    "self-instruct": Dataset("HuggingFaceH4/self_instruct", "train", lambda row: [row["prompt"]], "self_instruct_seed"),
}
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:"
OWN_KINDS = ("mathematics", "code", "conversation", "instruction", "copy", "writing")


@dataclass(frozen=True)
class Task:
    """Conversations to measure with.

    Attributes:
        source: where they came from: a file, a dataset, or "own prompts".
        conversations: user turns, each a list of messages to add before an answer.
    """

    name: str
    source: str
    conversations: list[Conversation]

    def digest(self) -> str:
        """Of what is asked: two tasks of one name may ask different things."""
        return hashlib.sha256(json.dumps(self.conversations).encode()).hexdigest()[:16]


def read_tasks(names: Sequence[str], data_dir: Path | None, limit: int | None) -> list[Task]:
    """Tasks by name, or by the path of a JSONL file.

    A task's name is looked up as ``NAME.jsonl`` in ``data_dir``; without a folder, on the hub. ``own`` is the prompts that are
    always installed, a task for each of their kinds.

    Raises:
        UsageError: an unknown task, one that is nowhere to be had, or an unreadable file.
    """
    tasks = []
    for name in names:
        if name == "own":
            tasks += own_tasks()
        elif name.endswith(".jsonl"):
            tasks.append(Task(Path(name).stem, name, read_prompts(Path(name).expanduser())))
        elif name not in DATASETS:
            raise UsageError(f"task {name!r} is unknown; use {', '.join(DATASETS)}, own, or a file FILE.jsonl")
        elif data_dir is not None:
            tasks.append(_from_folder(name, data_dir))
        else:
            tasks.append(_from_hub(name, limit))
    found = [task.name for task in tasks]
    if len(set(found)) < len(found):
        raise UsageError(f"two tasks are called {next(name for name in found if found.count(name) > 1)}; name each once")
    return [Task(task.name, task.source, task.conversations[:limit]) for task in tasks]


def own_tasks() -> list[Task]:
    rows = [json.loads(line) for line in OWN_PROMPTS.read_text().splitlines()]
    return [
        Task(f"own-{kind}", "own prompts", [[[{"role": "user", "content": r["prompt"]}]] for r in rows if r["kind"] == kind])
        for kind in OWN_KINDS
    ]


def _from_folder(name: str, folder: Path) -> Task:
    path = folder.expanduser() / f"{name}.jsonl"
    if not path.exists():
        raise UsageError(f"there is no {path}; name another --data-dir, or leave it out to use the hub")
    return Task(name, str(path), read_prompts(path))


def _from_hub(name: str, limit: int | None) -> Task:
    dataset = DATASETS[name]
    try:
        from datasets import load_dataset

        rows = load_dataset(dataset.name, dataset.config, split=dataset.split)
        wanted = rows.select(range(min(limit or len(rows), len(rows))))
        found = [[[{"role": "user", "content": turn}] for turn in dataset.turns(row)] for row in wanted]
    except ImportError:
        raise UsageError("tasks from the hub need the datasets package: pip install blockdraft[data], or --data-dir") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"task {name} cannot be had from the hub ({dataset.name}: {reason}); give --data-dir, or --tasks own"
        ) from error
    return Task(name, dataset.name, found)
