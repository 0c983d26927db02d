"""``blockdraft bench``: measure methods against each other, paired and interleaved."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.bench.tasks import Task
    from blockdraft.load import LoadedDrafter
    from blockdraft.targets.target import Target

TASKS = "gsm8k,math500,humaneval,mbpp,mt-bench,self-instruct"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure speed and acceptance, against plain decoding and other engines")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--tasks", metavar="A,B", help=f"of {TASKS}, own, FILE.jsonl; default: these six, or own without a hub")
    group.add_argument("--data-dir", type=options.path, metavar="DIR", help="folder with TASK.jsonl files, instead of the hub")
    group.add_argument(
        "--methods",
        default="ar,dflash,dflash-tree,lookup",
        metavar="A,B",
        help="of ar, dflash (a chain), dflash:S (of S denoising steps), dflash-tree, dflash-tree:N, dflash-tree:no-copies "
        "(earlier text is no branch of it), lookup, eagle3 (a chain), eagle3:N (of N tokens), eagle3-tree, eagle3-tree:N, "
        "draft-model, hf, hf-dflash, openai:URL; default: %(default)s",
    )
    group.add_argument("--limit", type=options.positive, metavar="N", help="first N prompts of each task")
    group.add_argument("--max-new-tokens", type=options.positive, default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--batch", type=options.positive, default=1, metavar="N", help="prompts at the same time; default: 1")
    group.add_argument("--repeats", type=options.positive, default=1, metavar="N", help="times are medians; default: 1")
    group.add_argument("--seed", type=int, default=0, help="of the order, the intervals and the noise; default: 0")
    parser.add_argument("--out", type=options.path, metavar="RESULT.json", help="write the figures")
    parser.add_argument("--html", type=options.path, metavar="REPORT.html", help="write tables and pictures, one file")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")
    models = options.add_target(parser, options.BEST_DTYPE)
    options.add_exact(models)
    models.add_argument(
        "--drafter",
        action="append",
        help="folder of a DFlash or EAGLE-3 drafter or of a smaller model, or one of each; default: the one shipped for the target",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = _names(args.methods)
    for place in (args.out, args.html):
        if place is not None and not place.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {place.resolve().parent} for {place.name}; make it first")
        if place is not None and place.is_dir():
            raise UsageError(f"{place} is a folder; name a file in it")
    from blockdraft.bench.methods import make_method, refuse_unknown
    from blockdraft.bench.report import refuse_without_matplotlib

    refuse_unknown(names)
    if args.html is not None:
        refuse_without_matplotlib()
    tasks = _tasks(args)
    target = options.load_target(args)
    from blockdraft.bench import runner
    from blockdraft.progress import Progress
    from blockdraft.rules.sampling import SamplingParams

    drafters = _drafters(args.drafter, names, target)
    methods = [make_method(name, target, [drafter for drafter, _ in drafters], args.target) for name in names]
    seed = args.seed if args.temperature > 0 else None
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=seed)
    settings = {
        "target": target.name,
        "drafter": ",".join(drafter.name for drafter, _ in drafters) or None,
        "drafter_sha256": [digest for _, digest in drafters],
        "tasks": {task.name: task.digest() for task in tasks},
        "methods": ",".join(names),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "exact": args.exact,
        "batch": args.batch,
        "repeats": args.repeats,
        "limit": args.limit,
        "seed": args.seed,
    }
    document: dict[str, Any] = {"environment": runner.environment(target), "settings": settings, "complete": False, "results": []}
    results = document["results"] = _begun(args.out, document)
    finished = {result["task"] for result in results}
    answers = {task.name: len(methods) * args.repeats * sum(map(len, task.conversations)) for task in tasks}
    before = sum(answers[name] for name in finished)
    with Progress("Measuring", sum(answers.values()), unit="answers") as progress:
        runner.run(
            *(target, tasks, methods, params, args.batch, args.repeats, args.seed),
            note=lambda done: progress.update(before + done),
            results=results,
            keep=lambda: _keep(document, args.out),
        )
    document["complete"] = True
    _write(document, args)
    return 0


def _drafters(folders: list[str] | None, names: list[str], target: "Target") -> "list[tuple[LoadedDrafter, str | None]]":
    """The drafters that were named, or the shipped one where a method needs it, with the digests of their weights.

    One of a kind, and none without a method.
    """
    from blockdraft.files import weights_digest
    from blockdraft.load import load_drafter, shipped_drafter

    asked = {name.partition(":")[0] for name in names}
    wanted = {kind: any(kind in name for name in asked) for kind in ("dflash", "eagle3", "draft-model")}
    drafters = [load_drafter(folder, target) for folder in folders or []]
    found = [drafter.method for drafter in drafters]
    for folder, kind in zip(folders or [], found, strict=True):
        if not wanted[kind]:
            raise UsageError(f"--drafter {folder} has no effect with these methods; leave it out or add {kind}")
        if found.count(kind) > 1:
            raise UsageError(f"--drafter names two {kind} drafters; measure one at a time")
    places = [Path(folder).expanduser() for folder in folders or []]
    if wanted["dflash"] and "dflash" not in found:
        drafters.append(load_drafter(None, target))
        places.append(shipped_drafter(target))
    return [(drafter, weights_digest(place)) for drafter, place in zip(drafters, places, strict=True)]


def _begun(out: Path | None, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of an interrupted run of the same kind: its finished tasks need not be measured again."""
    try:
        found = json.loads(out.read_text()) if out is not None else {}
        same = found["complete"] is False and all(found[key] == document[key] for key in ("environment", "settings"))
        done = list(dict.fromkeys(result["task"] for result in found["results"])) if same else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not same or str(document["environment"]["git"]).endswith("-dirty"):  # two unlike states of the code may be called that
        return []
    if done:
        print(f"blockdraft: {out} was interrupted; going on behind {', '.join(done)}", file=sys.stderr)
    return found["results"]


def _keep(document: dict[str, Any], out: Path | None) -> None:
    from blockdraft.files import write_whole

    if out is not None:
        write_whole(out, lambda path: path.write_text(json.dumps(document, indent=1) + "\n"))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--methods is empty; name one")
    if len(set(names)) < len(names):
        raise UsageError(f"--methods names {next(n for n in names if names.count(n) > 1)} twice; name each once")
    return names


def _tasks(args: argparse.Namespace) -> "list[Task]":
    from blockdraft.bench.tasks import read_tasks

    if args.tasks is not None:
        names = [name.strip() for name in args.tasks.split(",") if name.strip()]
        if not names:
            raise UsageError("--tasks is empty; name one")
        if args.data_dir is not None and all(name == "own" or name.endswith(".jsonl") for name in names):
            raise UsageError("--data-dir has no effect on these tasks; leave it out")
        return read_tasks(names, args.data_dir, args.limit)
    try:
        return read_tasks(TASKS.split(","), args.data_dir, args.limit)
    except UsageError as error:
        if args.data_dir is not None:
            raise
        print(f"blockdraft: {error}; measuring with own prompts", file=sys.stderr)
        return read_tasks(["own"], None, args.limit)


def _write(document: dict[str, Any], args: argparse.Namespace) -> None:
    from rich.console import Console

    from blockdraft.bench import report

    if args.json:
        print(json.dumps(document))
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(report.table(document["results"]))
    _keep(document, args.out)
    if args.html is not None:
        report.write_html(document, args.html)
