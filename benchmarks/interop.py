"""Our drafter in the engines that people run: loaded as it is, the same tokens, the same acceptance.

    python benchmarks/interop.py [--data-dir DIR] [--limit 20] [--tokens 64] [--environments DIR] [--out RESULT.json]
                                 [--engines official,transformers,speculators,vllm]

The drafter is converted to every layout first, which compares what it wrote. Then each engine runs in a process of its own, in a
virtual environment of its own where it needs one, on the same GSM8K prompts, greedy, float32. One line of JSON per check; what
could not run says ``skipped`` and why. Exit status 1 if a check failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from blockdraft.convert import convert
from blockdraft.load import load_target
from blockdraft.prompts import encode
from blockdraft.store import obtain, store_folder
from peers import HERE, Worker, acceptance, python_for

WITHIN = 0.03  # of our acceptance length
# Keys in which speculators' own converter differs from what is written here, and why.
DIFFERING = {
    "sliding_window_non_causal": "theirs stays false, which vLLM 0.32 takes for all layers being causal",
    "speculators_version": "the version that wrote it",
    "transformers_version": "the version that wrote it",
    "speculators_config": "names the target by path",
    "transformer_layer_config": "theirs carries keys of the drafter's file that are no layer's",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=HERE.parents[1] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--engines", default="official,transformers,speculators,vllm")
    parser.add_argument("--environments", type=Path, default=store_folder() / "peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target("smollm2-135m", "float32")
    lines = (args.data_dir / "gsm8k.jsonl").read_text().splitlines()[: args.limit]
    args.prompts = [encode(target, json.loads(line)["turns"][0]) for line in lines]
    shipped = HERE.parent / "src" / "blockdraft" / "shipped" / "smollm2-135m"
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as place:
        args.folders = {"zlab": shipped}
        for layout in ("speculators", "transformers", "gguf"):
            args.folders[layout] = Path(place) / ("drafter.gguf" if layout == "gguf" else f"{layout}-dflash")
            proofs = convert(shipped, args.folders[layout], layout, target)
            found.append(tell("convert", f"zlab to {layout}", True, "; ".join(proofs)))
        del target
        args.ours = answers(args, "ours", "dflash", shipped)
        for engine in args.engines.split(","):
            try:
                found += [tell(engine, *check) for check in ENGINES[engine](args)]
            except (ChildProcessError, subprocess.CalledProcessError, OSError) as error:
                found.append(tell(engine, "all", None, f"{type(error).__name__}: {error}"))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if any(check["passed"] is False for check in found):
        raise SystemExit(1)


def tell(engine: str, check: str, passed: bool | None, detail: str) -> dict:
    """One check, printed; None: skipped."""
    row = {"engine": engine, "check": check, "passed": passed, "detail": detail}
    print(json.dumps({**row, "passed": "skipped" if passed is None else passed}), flush=True)
    return row


def answers(args: argparse.Namespace, peer: str, method: str, drafter: Path) -> list[dict]:
    """A peer's answers to all prompts."""
    options = {"target": str(obtain("smollm2-135m")), "name": "smollm2-135m", "drafter": str(drafter), "dtype": "float32"}
    worker = Worker(peer, method, python_for(peer, args.environments), options)
    try:
        return [worker.answer(ids, args.tokens) for ids in args.prompts]
    finally:
        worker.kill()


def same_as_ours(args: argparse.Namespace, theirs: list[dict]) -> Iterator[tuple[str, bool, str]]:
    """The same tokens in the same rounds (the last round of an answer may be counted or not)."""
    tokens = sum(a["ids"] == b["ids"] for a, b in zip(args.ours, theirs, strict=True))
    rounds = sum(abs(a["rounds"] - b["rounds"]) <= 1 for a, b in zip(args.ours, theirs, strict=True))
    count = len(args.ours)
    yield "tokens", tokens == count, f"{tokens} of {count} answers equal"
    ours, others = (sum(answer["rounds"] for answer in found) for found in (args.ours, theirs))
    detail = f"{rounds} of {count} answers in as many rounds, give or take the last; {ours} here, {others} there"
    yield "rounds", rounds == count, detail


def official(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    yield from same_as_ours(args, answers(args, "dflash", "official-dflash", args.folders["zlab"]))


def transformers(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    yield from same_as_ours(args, answers(args, "transformers", "hf-folder", args.folders["transformers"]))


def vllm(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    plain = answers(args, "vllm", "vllm", args.folders["zlab"])
    ours = acceptance(args.ours)
    for layout in ("zlab", "speculators"):
        theirs = answers(args, "vllm", "vllm-dflash", args.folders[layout])
        same = sum(a["ids"] == b["ids"] for a, b in zip(plain, theirs, strict=True))
        yield f"{layout}: output", same == len(plain), f"{same} of {len(plain)} answers equal to its own without a drafter"
        found = acceptance(theirs)
        close = found is not None and abs(found / ours - 1) <= WITHIN
        yield f"{layout}: acceptance", close, f"acceptance length {found if found is None else round(found, 3)}, here {ours:.3f}"


def speculators(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    """Its loader reads what we write, and its converter writes what ours writes."""
    python = python_for("speculators", args.environments)
    with tempfile.TemporaryDirectory() as place:
        command = [
            python,
            str(HERE / "speculators_worker.py"),
            *map(str, (args.folders["zlab"], args.folders["speculators"], place)),
        ]
        done = subprocess.run([*command, str(obtain("smollm2-135m"))], check=False, capture_output=True, text=True)
        if done.returncode:
            yield "loads", False, done.stderr.strip().splitlines()[-1]
            return
        told = json.loads(done.stdout.strip().splitlines()[-1])
        yield "loads", told["loaded"], f"{told['tensors']} tensors as in the file"
        yield "same tensors", told["same_tensors"], told["tensors_detail"]
        ours = json.loads((args.folders["speculators"] / "config.json").read_text())
        theirs = json.loads((Path(place) / "config.json").read_text())
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        detail = f"differing: {', '.join(differing)}; listed: {', '.join(sorted(DIFFERING))}"
        yield "same keys, but for the listed", set(differing) <= set(DIFFERING), detail


ENGINES: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, bool, str]]]] = {
    "official": official,
    "transformers": transformers,
    "speculators": speculators,
    "vllm": vllm,
}

if __name__ == "__main__":
    sys.exit(main())
