"""``blockdraft train``: train a drafter from a recipe."""

import argparse
import sys
from pathlib import Path

from blockdraft.cli import options
from blockdraft.training.config import options_help, read_config


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a drafter from a recipe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"keys of a recipe, with their defaults:\n{options_help().replace('%', '%%')}",
    )
    parser.add_argument("config", type=options.path, nargs="?", metavar="CONFIG.yaml", help="recipe; without it, the defaults")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the recipe, as YAML: corpus=[a,b] learning_rate=3e-4"
    )
    parser.add_argument("--plan", action="store_true", help="say what would be read, how large and how long; write nothing")
    parser.add_argument("--threads", type=options.positive, help="CPU threads; default: all cores")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    overrides = list(args.overrides)
    path: Path | None = args.config
    if path is not None and "=" in str(path):
        overrides, path = [str(path), *overrides], None
    config = read_config(path, overrides)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.plan:
        from blockdraft.training.plan import plan
        from blockdraft.training.run import precision_of, prepare

        prepared = prepare(config)
        print(plan(prepared, precision_of(config, prepared.target.device)))
        return 0
    from blockdraft.training.trainer import Trainer

    trainer = Trainer(config)
    try:
        folder = trainer.train()
    except KeyboardInterrupt:
        steps = trainer.checkpoints.steps()
        kept = f"step {steps[-1]} is stored" if steps else "nothing is stored yet"
        print(f"blockdraft: stopped at step {trainer.step}; {kept}; the same command goes on from there", file=sys.stderr)
        return 130
    if folder is not None:
        tau = f" (tau {trainer.best[1]:.2f} at step {trainer.best[0]})" if trainer.best else ""
        print(f"{folder}{tau}")
    return 0
