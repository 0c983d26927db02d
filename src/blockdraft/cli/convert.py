"""``blockdraft convert``: a drafter in another layout, compared with what it was."""

import argparse

from blockdraft.cli import options

LAYOUTS = ("zlab", "speculators", "gguf", "transformers", "safeailab")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "convert",
        help="write a drafter in another layout, and prove it",
        description="What was written is read again and compared, tensors, settings and drafts, before DST appears.",
        epilog="example: blockdraft convert my-drafter my-drafter.gguf --to gguf --target my/model",
    )
    parser.add_argument("source", type=options.path, metavar="SRC", help="drafter folder or .gguf file")
    parser.add_argument("destination", type=options.path, metavar="DST", help="folder, or for gguf a file")
    parser.add_argument("--to", required=True, choices=LAYOUTS, help="layout of DST; safeailab is EAGLE-3's")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="an unknown key of the config to lose")
    parser.add_argument("--force", action="store_true", help="replace DST, a drafter's folder or a file")
    options.add_target(parser, "in which the target runs for the comparison; default: float32")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.formats.convert import check, convert

    check(args.source, args.destination, args.to, args.target, args.ignore, args.force)  # before a target is loaded
    target = options.load_target(args, "float32")
    for proof in convert(args.source, args.destination, args.to, target, args.ignore, args.force):
        print(f"  {proof}")
    print(args.destination)
    return 0
