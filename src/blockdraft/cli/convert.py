"""``blockdraft convert``: a drafter in another layout, compared with what it was."""

import argparse

from blockdraft.cli import options

LAYOUTS = ("zlab", "speculators", "gguf", "transformers", "safeailab")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("convert", help="write a drafter in another layout, and prove it")
    parser.add_argument("source", type=options.path, metavar="SRC", help="drafter folder or .gguf file")
    parser.add_argument("destination", type=options.path, metavar="DST", help="folder, or for gguf a file")
    parser.add_argument("--to", required=True, choices=LAYOUTS, help="layout of DST; safeailab is EAGLE-3's")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="an unknown key of the config to lose")
    parser.add_argument("--force", action="store_true", help="replace DST")
    options.add_target(parser, "of the probe; default: float32")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.convert import convert
    from blockdraft.errors import UsageError
    from blockdraft.formats.dialect import recognise

    recognise(args.source)  # what is no drafter is said before a target is loaded
    if args.destination.exists() and not args.force:
        raise UsageError(f"{args.destination} exists; use --force to replace it")
    target = options.load_target(args, "float32")
    for proof in convert(args.source, args.destination, args.to, target, args.ignore, args.force):
        print(f"  {proof}")
    print(args.destination)
    return 0
