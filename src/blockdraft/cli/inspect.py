"""``blockdraft inspect``: what a drafter's file says of itself, and what it can be converted to."""

import argparse
import json

from blockdraft.cli import options


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("inspect", help="show what a drafter folder or GGUF file is")
    parser.add_argument("drafter", type=options.path, metavar="DRAFTER", help="drafter folder or .gguf file")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.formats.dialect import recognise

    found = recognise(args.drafter)
    into = found.into()
    if args.json:
        shown = {"family": found.family, "layout": found.layout, "trainer": found.trainer, **found.facts}
        print(
            json.dumps(
                {**shown, "refused": found.refused, "converts_to": [name for name, reason in into.items() if reason is None]}
            )
        )
        return 0
    told = {"family": found.family, "layout": found.layout, "written by": found.trainer, **found.facts}
    for name, value in told.items():
        print(f"{name:16} {value}")
    print(f"{'read here':16} {'no: ' + found.refused if found.refused else 'yes'}")
    reasons: dict[str, list[str]] = {}
    for layout, reason in into.items():
        reasons.setdefault(reason or "yes", []).append(layout)
    print(f"{'converts to':16} {', '.join(reasons.pop('yes', [])) or 'nothing'}")
    for reason, layouts in reasons.items():
        print(f"{'':16} not {', '.join(layouts)}: {reason}")
    return 0
