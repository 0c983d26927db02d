"""``blockdraft data``: make a training corpus of the target's own answers."""

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.sampling import SamplingParams
    from blockdraft.target import Target
    from blockdraft.training.corpus import Corpus

    Given = tuple[str, str, list[dict[str, str]]]

CONTEXT = 512  # conversations are cut here
ROUND_OF_MESSAGES = 512  # self-written messages are made and answered in rounds of this many


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("data", help="make a training corpus: prompts, and the target's own answers")
    parser.add_argument("out", type=Path, help="corpus folder; started again, the run goes on where it was")
    parser.add_argument("--prompts", type=options.path, action="append", default=[], metavar="FILE.jsonl", help="repeatable")
    parser.add_argument("--self-synthesize", type=options.positive, metavar="N", help="messages that the target writes itself")
    parser.add_argument(
        "--kinds", default="mathematics,code,conversation,instruction", help="of them, in turn; default: %(default)s"
    )
    parser.add_argument(
        "--max-new-tokens", type=options.positive, default=400, metavar="N", help="per answer; default: %(default)s"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers; default: 0, greedy")
    parser.add_argument("--slots", type=options.positive, default=64, metavar="N", help="answers at a time; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and write nothing")
    parser.add_argument("--per-source", type=options.positive, metavar="N", help="at most N given prompts of each source")
    parser.add_argument("--json", action="store_true", help="the counts as one JSON object on stdout")
    options.add_target(parser, options.BEST_DTYPE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.sampling import SamplingParams
    from blockdraft.training.synthesis import OPENINGS

    kinds = args.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in OPENINGS]
    if unknown:
        raise UsageError(f"kind {unknown[0]!r} is unknown; use {', '.join(OPENINGS)}")
    if not args.prompts and not args.self_synthesize:
        raise UsageError("nothing to ask: give --prompts FILE.jsonl, --self-synthesize N, or both")
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed if args.temperature > 0 else None
    )
    given = [row for path in args.prompts for row in numbered(path)]
    given = chosen(given, args.per_source, args.seed)
    target = options.load_target(args)
    from blockdraft.training.corpus import Corpus, identity

    who = identity(target, max_new_tokens=args.max_new_tokens, temperature=args.temperature, context=CONTEXT)
    if args.plan:
        print(f"{len(given)} given prompts and {args.self_synthesize or 0} self-written messages ({args.kinds}) to {args.out}")
        print(f"at most {args.max_new_tokens} tokens an answer, {args.slots} answers at a time, by {json.dumps(who)}")
        return 0
    corpus = Corpus(args.out, who)
    status = 0
    try:
        fill(args, target, corpus, params, given, kinds)
    except KeyboardInterrupt:
        print(f"blockdraft: stopped at {len(corpus.keys)} answers; the same command goes on from there", file=sys.stderr)
        status = 130
    corpus.seal()
    if args.json:
        print(json.dumps({"rows": dict(corpus.counts), "answer_tokens": dict(corpus.tokens)}))
    else:
        for source in sorted(corpus.counts):
            print(f"{source:20} {corpus.counts[source]:8} answers {corpus.tokens[source]:10} tokens")
    return status


def numbered(path: Path) -> list[tuple[str, str, list[dict[str, str]]]]:
    """Key, source and first-turn messages of each row of a file; the key is a digest of the messages."""
    from blockdraft.prompts import read_prompts

    conversations = read_prompts(path)
    sources = [json.loads(line).get("source", path.stem) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
    rows = []
    for turns, source in zip(conversations, sources, strict=True):
        digest = hashlib.sha256(json.dumps(turns[0]).encode()).hexdigest()[:16]
        rows.append((f"given/{digest}", str(source), turns[0]))
    return rows


def chosen(rows: "list[Given]", per_source: int | None, seed: int) -> "list[Given]":
    """The rows in random order, without repeated keys, at most ``per_source`` of each source."""
    rows = list({row[0]: row for row in rows}.values())
    random.Random(seed).shuffle(rows)
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row[1]] += 1
        if per_source is None or seen[row[1]] <= per_source:
            kept.append(row)
    return kept


def fill(
    args: argparse.Namespace, target: "Target", corpus: "Corpus", params: "SamplingParams", given: "list[Given]", kinds: list[str]
) -> None:
    """Answer the given prompts, then write messages round by round and answer those."""
    from blockdraft.progress import Progress
    from blockdraft.prompts import encode
    from blockdraft.training.answering import Question, Tally, answer, write_messages
    from blockdraft.training.synthesis import user_header, written_texts

    tally = Tally()
    with Progress("Answering", len(given) + (args.self_synthesize or 0), unit="prompts") as progress:
        asked = (Question(key, source, encode(target, messages)) for key, source, messages in given)
        for _ in answer(target, corpus, asked, params, args.slots, CONTEXT, tally):
            progress.update(tally.answers)
        if args.self_synthesize:
            known = written_texts(target, user_header(target), corpus.rows())
            first = corpus.last_written(args.seed) // ROUND_OF_MESSAGES * ROUND_OF_MESSAGES
            for start in range(first, args.self_synthesize, ROUND_OF_MESSAGES):
                numbers = range(start, min(start + ROUND_OF_MESSAGES, args.self_synthesize))
                questions = write_messages(target, kinds, numbers, args.seed, args.slots, known, corpus.keys, tally)
                for _ in answer(target, corpus, iter(questions), params, args.slots, CONTEXT, tally):
                    progress.update(tally.answers)
    print(f"blockdraft: {tally.summary()}", file=sys.stderr)
