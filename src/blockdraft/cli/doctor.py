"""``blockdraft doctor``: why a pair does not work, with figures, and a mended copy."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.doctor.diagnosis import Diagnosis, Doubt
    from blockdraft.drafters.network import DFlash
    from blockdraft.formats.zlab import WindowOff


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out why a drafter is rarely right",
        description="Scores every other reading of a drafter on the target's own answers. Exit status 0: healthy; 1: not.",
    )
    parser.add_argument("--drafter", type=options.path, required=True, help="DFlash drafter: folder or .gguf file")
    parser.add_argument(
        "--probe",
        type=options.path,
        metavar="FILE.jsonl",
        help="prompts to ask, the first turn of each row; default: 48 of our own",
    )
    parser.add_argument("--fix", type=options.path, metavar="OUT", help="write the drafter as it fits best, in z-lab's layout")
    parser.add_argument("--json", action="store_true", help="for machines")
    options.add_target(parser, "default: float32")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.doctor.diagnosis import diagnose
    from blockdraft.drafters.network import DFlash
    from blockdraft.formats import zlab
    from blockdraft.formats.convert import check_place, read
    from blockdraft.formats.dialect import recognise
    from blockdraft.progress import Progress
    from blockdraft.prompts import OWN_PROMPTS, read_prompts

    dialect = recognise(args.drafter)
    if args.fix:
        if args.fix.exists():
            raise UsageError(f"{args.fix} exists; name another place for the mended drafter")
        check_place(args.fix, "zlab", False, (args.drafter, Path(args.target).expanduser()))
    if dialect.refused or dialect.family not in ("DFlash", "DFlash 2"):
        raise UsageError(f"{args.drafter}: {dialect.refused or f'the doctor reads DFlash drafters, not {dialect.family}'}")
    conversations = [turns[0] for turns in read_prompts(args.probe or OWN_PROMPTS)]
    target = options.load_target(args, "float32")
    doubt = None
    try:
        network = read(args.drafter, dialect, target)
    except zlab.WindowOff as error:
        if dialect.layout != "zlab":
            raise
        network, doubt = in_doubt(args.drafter, error)
    assert isinstance(network, DFlash)
    found = None
    with Progress("Reading it another way", 16, unit="readings") as progress:
        for scored, found in diagnose(network, target, conversations, args.drafter, doubt=doubt):
            progress.update(scored)
    assert found is not None
    if args.json:
        print(json.dumps(found.told()))
    else:
        report(found)
    if args.fix:
        fix(found, network, args)
    return 0 if found.verdict == "healthy" else 1


def in_doubt(folder: Path, error: "WindowOff") -> "tuple[DFlash, Doubt]":
    """A drafter that may slide or not, read as if it did not, and its other meanings."""
    from blockdraft.doctor.diagnosis import Doubt
    from blockdraft.doctor.readings import WINDOWS
    from blockdraft.formats import zlab

    meant = zlab.read_config(folder, window=error.size) if error.size else None
    tried = {window: zlab.read_config(folder, window=window) for window in WINDOWS} if meant is None else {}
    return zlab.read(folder, window=0), Doubt(str(error), meant, tried)


def fix(found: "Diagnosis", network: "object", args: argparse.Namespace) -> None:
    from blockdraft.formats.convert import write_mended

    if found.mended is None:
        print("blockdraft: there is nothing that a mended file could say better; none was written", file=sys.stderr)
        return
    write_mended(args.drafter, network, found.mended, args.fix)  # type: ignore[arg-type]
    print(f"blockdraft: mended: {args.fix}", file=sys.stderr)


def report(found: "Diagnosis") -> None:
    from blockdraft.doctor.diagnosis import FEW

    words = {"healthy": "HEALTHY: no other reading of it fits better", "fault": "FAULT", "undecided": "UNDECIDED"}
    print(words[found.verdict])
    for number, fault in enumerate(found.faults):
        print(f"{'  also: ' if number else '  '}{fault}")
    if found.verdict == "undecided" and found.conversations >= FEW:
        print("  it is hardly ever right, and no other reading makes it better: trained too little, or for another target")
    if found.acceptance_length is not None:
        print(
            f"as configured: {found.acceptance_length:.3f} tokens a round, teacher-forced on {found.anchors} anchors of "
            f"{found.conversations} answers"
        )
        print("other readings, and how they differ from it:")
        for score in found.scores:
            print(f"  {score.difference:+.3f} [{score.low:+.3f}, {score.high:+.3f}]  {score.name} ({score.anchors} anchors)")
    if found.modes:
        print("by how prompts are put: " + ", ".join(f"{name} {length:.2f}" for name, length in found.modes.items()))
    for note in found.notes:
        print(f"note: {note}")
