"""EAGLE-3, DFlash, copies and plain decoding on equal terms: tables for docs/results.md, by one command that goes on where it was.

    python benchmarks/results.py [--data-dir DIR] [--limit 4] [--tokens 128] [--eagle3 FOLDER] [--place FOLDER] [--write FILE.md]

Runs ``blockdraft bench`` greedy and at temperature 1 (each keeps every finished task), computes what both drafters take for
Qwen3-8B, and prints Markdown, or puts it between the two marks in a file. About two hours on two cores with the defaults.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
METHODS = "ar,lookup,eagle3,eagle3-tree,dflash,dflash-tree"
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
        parts += [f"### {how}, {args.limit} prompts of each task, {args.tokens} tokens", table(found), costs(found)]
    parts += ["### Computed for Qwen3-8B", memory()]
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
        "methods": METHODS,
        "dtype": "float32",
        "limit": args.limit,
        "max-new-tokens": args.tokens,
        "temperature": temperature,
        "out": out,
        "html": out.with_suffix(".html"),
    }
    return bench((SHIPPED, args.eagle3), options)


def bench(drafters: Sequence[Path], options: dict[str, object]) -> list[dict]:
    """What ``blockdraft bench`` finds; ``options`` has its ``out``, from which it goes on."""
    words = [("drafter", drafter) for drafter in drafters] + list(options.items())
    command = [sys.executable, "-m", "blockdraft", "bench"] + [word for name, value in words for word in (f"--{name}", str(value))]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(Path(str(options["out"])).read_text())["results"]


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


def costs(results: list[dict]) -> str:
    """What a round takes and what memory a method needs, on the mean over tasks; acceptance by slot."""
    methods = list(dict.fromkeys(row["method"] for row in results if row["method"] != "ar"))
    names = ("draft, ms a round", "verify", "everything else", "extra memory, MB", "acceptance by position")
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for method in methods:
        rows = [row for row in results if row["method"] == method]
        rounds = sum(row["rounds"] for row in rows)
        split = {key: sum(row["time_split"][key] * row["rounds"] for row in rows) / rounds * 1e3 for key in rows[0]["time_split"]}
        extra = max(row["extra_bytes"] for row in rows) / 1e6
        longest = max(len(row["acceptance_by_position"]) for row in rows)
        stood = [
            sum(row["acceptance_by_position"][i] * row["rounds"] for row in rows if i < len(row["acceptance_by_position"])) / rounds
            for i in range(min(7, longest))
        ]
        times = " | ".join(f"{value:.1f}" for value in split.values())
        lines.append(f"| `{method}` | {times} | {extra:.0f} | {', '.join(f'{share:.2f}' for share in stood)} |")
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
