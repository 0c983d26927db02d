"""Blocks of 4, 8 and 16 slots drafted in 1, 2 and 4 denoising steps, each with a drafter trained for it in equal, short time.

    python benchmarks/denoising.py corpus=[corpus] [key=value ...] [--minutes 8] [--data-dir DIR] [--limit 2] [--tokens 96]
                                   [--place FOLDER] [--plot FILE.png] [--write FILE.md]

For every block size two drafters go on from the shipped one: one for a single step, and one that has seen partly revealed blocks
(``revealed=0.5``), for several. How many steps fit into the time is measured first, and kept, so that a run goes on where it was.
Then ``blockdraft bench`` runs each of them, greedy, beside plain decoding. About an hour and a quarter on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blockdraft.training.config import read_config
from blockdraft.training.trainer import Trainer
from results import HERE, SHIPPED, bench, put, refuse_without_marks

CONFIG = HERE.parent / "configs" / "smollm2-135m.yaml"
BLOCKS = (4, 8, 16)
STEPS = {"one": (1,), "several": (2, 4)}
REVEALED = {"one": 0.0, "several": 0.5}
MARKS = ("<!-- denoising: written by benchmarks/denoising.py -->", "<!-- end of denoising -->")
FIGURES = {
    "acceptance_length": "acceptance length",
    "drafted": "acceptance length / denoising steps",
    "tokens_per_second": "tokens per second",
    "speedup": "speed-up over plain decoding",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="of the recipe; corpus=[...] at least")
    parser.add_argument("--minutes", type=float, default=8, help="of training, for each of the six drafters")
    parser.add_argument("--data-dir", type=Path, default=HERE.parents[1] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--place", type=Path, default=Path("runs/denoising"))
    parser.add_argument("--plot", type=Path, default=Path("runs/denoising/denoising.png"))
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table between the marks of this file")
    args = parser.parse_args()
    if args.write is not None:
        refuse_without_marks(args.write, MARKS)
    args.place.mkdir(parents=True, exist_ok=True)
    drafters = {(block, kind): trained(args, block, kind) for block in BLOCKS for kind in STEPS}
    found = [row for (block, kind), (folder, steps) in drafters.items() for row in measured(args, block, kind, folder, steps)]
    draw(found, args.plot)
    text = table(found, args)
    if args.write is None:
        print(text)
    else:
        put(args.write, text, MARKS)


def trained(args: argparse.Namespace, block: int, kind: str) -> tuple[Path, int]:
    """A drafter folder, and the number of steps it was trained for."""
    out, note = args.place / f"{block}-{kind}", args.place / f"{block}-{kind}.json"
    recipe = [*args.overrides, f"init={SHIPPED}", f"block_size={block}", f"revealed={REVEALED[kind]}"]
    recipe += ["evaluate_every=1000000", "evaluate_prompts=1", "evaluate_tokens=2"]  # the bench will judge
    asked = {"minutes": args.minutes, "recipe": recipe}
    if not note.exists():
        note.write_text(json.dumps({**asked, "steps": steps_in(60 * args.minutes, recipe)}))
    found = json.loads(note.read_text())
    if {key: found[key] for key in asked} != asked:
        raise SystemExit(f"denoising.py: {out} was trained otherwise ({note}); take another --place")
    steps = found["steps"]
    if not (out / "done").exists():
        command = [sys.executable, "-m", "blockdraft", "train", str(CONFIG), *recipe, f"max_steps={steps}", f"out={out}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (out / "done").touch()
    return out / "drafter", steps


def steps_in(seconds: float, recipe: list[str]) -> int:
    """How many steps of a recipe fit into a time."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(read_config(CONFIG, [*recipe, f"out={folder}"]))
        for step in range(6):
            if step == 2:
                began = time.perf_counter()
            trainer.learner.step(trainer.step)
            trainer.step += 1
        return max(1, round(seconds / (time.perf_counter() - began) * 4))


def measured(args: argparse.Namespace, block: int, kind: str, folder: Path, steps: int) -> list[dict]:
    """The figures of one drafter, means over the tasks; a bench that was not done goes on."""
    methods = {1: "dflash", 2: "dflash:2", 4: "dflash:4"}
    counts = [count for count in STEPS[kind] if count < block]  # a block has one slot fewer to fill than its size
    options = {
        "data-dir": args.data_dir,
        "methods": ",".join(["ar", *(methods[count] for count in counts)]),
        "dtype": "float32",
        "limit": args.limit,
        "max-new-tokens": args.tokens,
        "out": args.place / f"{block}-{kind}-bench.json",
    }
    results = bench([folder], options)
    rows = []
    for count in counts:
        own = [row for row in results if row["method"] == methods[count]]
        figures = {key: sum(row[key] for row in own) / len(own) for key in ("acceptance_length", "speedup", "tokens_per_second")}
        figures["drafted"] = figures["acceptance_length"] / count
        rows.append({"block": block, "denoising": count, "training_steps": steps, **figures})
    return rows


def table(rows: list[dict], args: argparse.Namespace) -> str:
    lines = [
        "| block | denoising steps | training steps | acceptance length | the same / steps | tokens/s | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{row['acceptance_length']:.2f} | {row['drafted']:.2f} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f}x"
        lines.append(f"| {row['block']} | {row['denoising']} | {row['training_steps']} | {figures} |")
    how = f"{args.minutes:g} minutes of training each; {args.limit} prompts of each of the six tasks, {args.tokens} tokens, greedy"
    return f"{how}, float32:\n\n" + "\n".join(lines)


def draw(rows: list[dict], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(FIGURES), figsize=(15, 3.6), layout="constrained")
    for axis, (key, name) in zip(axes, FIGURES.items(), strict=True):
        for count in sorted({row["denoising"] for row in rows}):
            own = [row for row in rows if row["denoising"] == count]
            axis.plot([row["block"] for row in own], [row[key] for row in own], marker="o", label=f"S = {count}")
        axis.set(xlabel="block size", ylabel=name, xticks=BLOCKS)
        axis.grid(alpha=0.3)
    axes[0].legend(title="denoising steps")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
