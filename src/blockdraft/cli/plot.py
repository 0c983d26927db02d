"""``blockdraft plot``: the curves of a training run."""

import argparse
from pathlib import Path

from blockdraft.cli import options


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plot", help="draw the curves of a training run")
    parser.add_argument("run_folder", type=options.path, metavar="RUN", help="run folder, with metrics.jsonl")
    parser.add_argument("--out", type=options.path, metavar="FILE.png", help="default: RUN/curves.png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.training.plot import plot

    out: Path = args.out or args.run_folder / "curves.png"
    print(plot(args.run_folder, out))
    return 0
