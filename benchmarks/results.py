"""EAGLE-3, DFlash, copies and plain decoding on equal terms: tables for docs/results.md, by one command that goes on where it was.

    python benchmarks/results.py [--data-dir DIR] [--limit 4] [--tokens 128] [--eagle3 FOLDER] [--place FOLDER] [--write FILE.md]

Runs ``blockdraft bench`` greedy and at temperature 1 (each keeps every finished task), reads the memory of every method
(``memory.py``), computes what both drafters take for Qwen3-8B, and prints Markdown, or puts it between the two marks in a file.
Started again it measures nothing that is there from the same commit, drafters and settings. About an hour on two cores.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from blockdraft.bench.runner import revision
from blockdraft.files import weights_digest
from memory import measured as measured_memory

HERE = Path(__file__).resolve().parent
EAGLES, DFLASHES = ("eagle3", "eagle3:3", "eagle3-tree:15", "eagle3-tree"), ("dflash", "dflash-tree:no-copies")
METHODS = ("ar", "lookup", *EAGLES, *DFLASHES, "dflash-tree")
EAGLE3 = HERE / "drafters" / "smollm2-135m-eagle3"
SHIPPED = HERE.parent / "src" / "blockdraft" / "shipped" / "smollm2-135m"
MARKS = ("<!-- head to head: written by benchmarks/results.py -->", "<!-- end of head to head -->")
QWEN3_8B = {"width": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 12288, "layers": 36}
ROWS = (
    ("speedup", "speed-up", "{:.2f}x"),
    ("acceptance_length", "acceptance length", "{:.2f}"),
    ("first_slot_acceptance", "first slot", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:.1f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=HERE.parents[1] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--eagle3", type=Path, default=EAGLE3)
    parser.add_argument("--place", type=Path, default=Path("runs/results"))
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables between the marks of this file")
    args = parser.parse_args()
    if not (args.eagle3 / "config.json").exists():
        raise SystemExit(f"results.py: there is no EAGLE-3 drafter in {args.eagle3}; train one, or name one with --eagle3")
    if args.write is not None:
        refuse_without_marks(args.write, MARKS)
    args.place.mkdir(parents=True, exist_ok=True)
    parts = []
    for temperature in (0.0, 1.0):
        found = measured(args, temperature)
        how = "greedy" if temperature == 0 else "temperature 1, seeded"
        parts += [f"### {how}, {args.limit} prompts of each task, {args.tokens} tokens", table(found), claim(found)]
        parts += [costs(found, "all tasks"), by_task(found)]
    parts += ["### Memory, measured", resident(args), "### Memory, computed for Qwen3-8B", memory()]
    text = "\n\n".join(parts)
    if args.write is None:
        print(text)
    else:
        put(args.write, text, MARKS)


def measured(args: argparse.Namespace, temperature: float) -> list[dict]:
    """Results of one bench; from its file if it is complete, else it goes on."""
    out = args.place / f"temperature-{temperature:g}.json"
    options = {
        "data-dir": args.data_dir,
        "methods": ",".join(METHODS),
        "dtype": "float32",
        "limit": args.limit,
        "max-new-tokens": args.tokens,
        "temperature": temperature,
        "out": out,
        "html": out.with_suffix(".html"),
    }
    return bench((SHIPPED, args.eagle3), options)


def bench(drafters: Sequence[Path], options: dict[str, object]) -> list[dict]:
    """What ``blockdraft bench`` finds; ``options`` has its ``out``, from which it goes on, or which is complete already."""
    words = [("drafter", drafter) for drafter in drafters] + list(options.items())
    command = [sys.executable, "-m", "blockdraft", "bench"] + [word for name, value in words for word in (f"--{name}", str(value))]
    out = Path(str(options["out"]))
    note, asked = out.with_suffix(".asked"), json.dumps([command[1:], revision(), [weights_digest(folder) for folder in drafters]])
    known = "-dirty" not in asked and note.exists() and note.read_text() == asked
    if not (known and json.loads(out.read_text())["complete"]):
        subprocess.run(command, check=True, stdout=sys.stderr)
        note.write_text(asked)
    return json.loads(out.read_text())["results"]


def table(results: list[dict]) -> str:
    """Speed-up, acceptance and tokens per second, by task and on the mean."""
    tasks = list(dict.fromkeys(row["task"] for row in results))
    methods = list(dict.fromkeys(row["method"] for row in results))
    found = {(row["task"], row["method"]): row for row in results}
    lines = [f"| | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 2) + "|"]
    for key, name, form in ROWS:
        for method in methods:
            values = [found[task, method][key] for task in tasks]
            if None in values or (method == "ar" and key == "speedup"):
                continue
            cells = " | ".join(form.format(value) for value in [*values, sum(values) / len(values)])
            lines.append(f"| {name}, `{method}` | {cells} |")
    same = {method: sum(found[task, method]["identical_to_ar"] or 0 for task in tasks) / len(tasks) for method in methods}
    told = ", ".join(f"`{method}` {100 * share:.0f} %" for method, share in same.items() if method != "ar")
    return "\n".join(lines) + f"\n\nAnswers identical to `ar`: {told}."


def claim(results: list[dict]) -> str:
    """The better of each family's methods on the mean of the tasks, and their ratio."""
    mean = {method: _mean([row["speedup"] for row in results if row["method"] == method]) for method in (*EAGLES, *DFLASHES)}
    eagle, dflash = (max(family, key=lambda name: mean[name]) for family in (EAGLES, DFLASHES))
    ratio = mean[dflash] / mean[eagle]
    return (
        f"The better DFlash without copies is `{dflash}` ({mean[dflash]:.2f}x), the better EAGLE-3 `{eagle}` ({mean[eagle]:.2f}x): "
        f"**{ratio:.2f}x** between them on the mean of the tasks."
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def by_task(results: list[dict]) -> str:
    """``costs`` of every task, folded away."""
    tasks = list(dict.fromkeys(row["task"] for row in results))
    parts = [costs([row for row in results if row["task"] == task], task) for task in tasks]
    return "\n\n".join(["<details><summary>Rounds and acceptance by position, by task</summary>", *parts, "</details>"])


def resident(args: argparse.Namespace) -> str:
    """What the system counts of each method's memory."""
    found = measured_memory(
        [method for method in METHODS if method not in ("ar", "eagle3:3", "eagle3-tree:15")],
        [str(SHIPPED), str(args.eagle3)],
        args.tokens,
    )
    lines = ["| beyond plain decoding, MB | held | of it weights, packed copies and caches | workspace |", "|---|---|---|---|"]
    for method, row in found.items():
        lines.append(f"| `{method}` | " + " | ".join(f"{row[key] / 1e6:.0f}" for key in ("held", "counted", "workspace")) + " |")
    return "\n".join(lines)


def costs(results: list[dict], which: str) -> str:
    """What a round takes, and acceptance by slot, over all rounds."""
    methods = list(dict.fromkeys(row["method"] for row in results if row["method"] != "ar"))
    names = ("rounds", "draft, ms a round", "verify", "everything else", "acceptance by position")
    lines = [f"| {which} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method in methods:
        rows = [row for row in results if row["method"] == method and row["rounds"]]
        rounds = sum(row["rounds"] for row in rows)
        if not rounds:
            continue
        split = [
            f"{sum(row['time_split'][key] * row['rounds'] for row in rows) / rounds * 1e3:.1f}"
            if all(row["time_split"] for row in rows)  # devices that work on while Python goes ahead have none
            else "-"
            for key in ("draft", "verify", "other")
        ]
        longest = max(len(row["acceptance_by_position"]) for row in rows)
        stood = [
            sum(row["acceptance_by_position"][i] * row["rounds"] for row in rows if i < len(row["acceptance_by_position"])) / rounds
            for i in range(min(7, longest))
        ]
        lines.append(f"| `{method}` | {rounds} | {' | '.join(split)} | {', '.join(f'{share:.2f}' for share in stood)} |")
    return "\n".join(lines)


def memory() -> str:
    """Parameters and bytes of both drafters at Qwen3-8B's shapes, and the formulas."""
    q = QWEN3_8B
    width, size, inner = q["width"], q["head_dim"], q["inner"]
    heads, kv = q["heads"] * size, q["kv_heads"] * size
    layer = width * (2 * heads + 2 * kv) + 3 * width * inner
    dflash = 5 * layer + 5 * width * width
    words = 32000
    eagle3 = 3 * width * width + 2 * width * (heads + 2 * kv) + heads * width + 3 * width * inner + words * width
    cache = {name: 2 * layers * kv * 2 for name, layers in (("DFlash", 5), ("EAGLE-3", 1))}  # bytes a token in bfloat16
    rows = [
        ("DFlash, 5 layers, 5 taps", "L (D (2 Hq + 2 Hkv) + 3 D I) + T D^2", dflash, cache["DFlash"]),
        ("EAGLE-3, 32,000 words", "3 D^2 + 2 D (Hq + 2 Hkv) + Hq D + 3 D I + V D", eagle3, cache["EAGLE-3"]),
    ]
    lines = ["| drafter | parameters | | weights, bfloat16 | cache of 4,096 tokens |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {formula} | {count / 1e9:.3f} B | {2 * count / 1e9:.2f} GB | {4096 * each / 1e6:.0f} MB |"
        for name, formula, count, each in rows
    ]
    why = (
        "D = 4096, I = 12288, Hq = 32 x 128, Hkv = 8 x 128; norms, and EAGLE-3's copy of the embedding (1.24 GB where a file has "
        "one), left out. The 0.8 GB that a forum names for EAGLE-3 are these weights; its 0.4 GB for DFlash are one layer "
        f"({2 * layer / 1e9:.2f} GB), not the five of the published drafter, which needs more memory than an EAGLE-3."
    )
    return "\n".join(lines) + f"\n\n{why}"


def refuse_without_marks(path: Path, marks: tuple[str, str]) -> None:
    """End with a sentence, before anything is measured, if the file has no place for what will be written."""
    if not path.is_file() or any(mark not in path.read_text() for mark in marks):
        raise SystemExit(f"{path} lacks the marks {marks[0]} and {marks[1]}")


def put(path: Path, text: str, marks: tuple[str, str]) -> None:
    """Replace what stands between the marks."""
    before, rest = path.read_text().split(marks[0])
    path.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{rest.split(marks[1])[1]}")


if __name__ == "__main__":
    main()
