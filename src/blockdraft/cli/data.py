"""``blockdraft data``: make a training corpus of the target's own answers."""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.rules.sampling import SamplingParams
    from blockdraft.targets.target import Target
    from blockdraft.training.data.answering import Tally
    from blockdraft.training.data.corpus import Corpus
    from blockdraft.training.data.questions import Given

KINDS = "mathematics,code,conversation,instruction"
LEAST_CONTEXT = 64
IN_FLIGHT = 16  # for each slot, so many messages back a run that goes on looks for those that were on their way


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("data", help="make a training corpus: prompts, and the target's own answers")
    parser.add_argument("out", type=Path, help="corpus folder; started again, the run goes on where it was")
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--prompts",
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE.jsonl|DATASET",
        help="rows with prompt, turns or messages",
    )
    group.add_argument("--per-source", type=options.positive, metavar="N", help="at most N given prompts of each source")
    group.add_argument("--self-synthesize", type=options.positive, metavar="N", help="messages that the target writes itself")
    group.add_argument("--kinds", metavar="A,B", help=f"of them, in turn; default: {KINDS}")
    group.add_argument(
        "--text", action="extend", nargs="+", default=[], metavar="FILE|DIR|DATASET", help="text as it is, for soft labels"
    )
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=options.positive, default=400, metavar="N", help="per answer; default: %(default)s")
    group.add_argument(
        "--context", type=options.positive, default=512, metavar="N", help="of prompt and answer together; default: %(default)s"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers; default: 0, greedy")
    group.add_argument("--thinking", choices=("on", "off"), help="the template's thinking mode; default: the template's own")
    group.add_argument("--slots", type=options.positive, default=64, metavar="N", help="answers at a time; default: %(default)s")
    group.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    group.add_argument("--endpoint", metavar="URL", help="ask an OpenAI-compatible server that serves the target, up to /v1")
    group.add_argument("--endpoint-model", default="", metavar="NAME", help="as the server names it; default: its first")
    group = parser.add_argument_group("answers that are there already")
    group.add_argument(
        "--answers", type=options.path, action="extend", nargs="+", default=[], metavar="FILE.jsonl.gz", help="take in first"
    )
    group.add_argument("--export", type=options.path, metavar="FILE.jsonl.gz", help="write all answers into one compact file")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and write nothing")
    parser.add_argument("--json", action="store_true", help="the counts as one JSON object on stdout")
    options.add_target(parser, options.BEST_DTYPE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check(args)
    from blockdraft.rules.sampling import SamplingParams
    from blockdraft.training.data.questions import given_questions

    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed if args.temperature > 0 else None
    )
    given = given_questions(args.prompts, args.per_source, args.seed)
    target = options.load_target(args)
    check_with(args, target)
    from blockdraft.training.data.corpus import Corpus, identity

    thinking = _thinking(args)
    who = identity(
        target, thinking=thinking, max_new_tokens=args.max_new_tokens, temperature=args.temperature, context=args.context
    )
    if args.plan:
        print(plan(args, given, who))
        return 0
    corpus = Corpus(args.out, who)
    status = 0
    try:
        fill(args, target, corpus, params, given, thinking)
    except KeyboardInterrupt:
        print(f"blockdraft: stopped at {len(corpus.keys)} answers; the same command goes on from there", file=sys.stderr)
        status = 130
    finally:
        corpus.seal()
    if args.export and status == 0:
        from blockdraft.training.data.exchange import export_answers

        count = export_answers(corpus, target, args.export)
        print(f"blockdraft: {count} answers in {args.export}, {args.export.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    if args.json:
        print(json.dumps({"rows": dict(corpus.counts), "answer_tokens": dict(corpus.tokens)}))
    else:
        for source in sorted(corpus.counts):
            print(f"{source:20} {corpus.counts[source]:8} answers {corpus.tokens[source]:10} tokens")
    return status


def check(args: argparse.Namespace) -> None:
    """Refuse options that cannot take effect, before anything is loaded."""
    from blockdraft.training.data.synthesis import OPENINGS

    unknown = [kind for kind in (args.kinds or KINDS).split(",") if kind not in OPENINGS]
    if unknown:
        raise UsageError(f"kind {unknown[0]!r} is unknown; use {', '.join(OPENINGS)}")
    if not (args.prompts or args.self_synthesize or args.text or args.answers or args.export):
        raise UsageError("nothing to ask: give --prompts FILE.jsonl, --self-synthesize N, --text FILE, or several of them")
    if args.endpoint and args.self_synthesize:
        raise UsageError("--self-synthesize works with the target loaded here; leave --endpoint out, or ask given --prompts")
    for option, partner in (("endpoint_model", "endpoint"), ("kinds", "self_synthesize"), ("per_source", "prompts")):
        if getattr(args, option) and not getattr(args, partner):
            raise UsageError(f"{_flag(option)} has no effect without {_flag(partner)}; leave it out")
    if args.endpoint and not args.prompts:
        raise UsageError("--endpoint has nothing to ask; give --prompts FILE.jsonl, or leave it out")
    asks = args.prompts or args.self_synthesize or args.text or args.answers
    if args.export and not asks and not (args.out / "corpus.json").exists():
        raise UsageError(f"there is no corpus in {args.out} to export; name the folder that `blockdraft data` has filled")
    for place in args.answers:
        if not place.is_file():
            raise UsageError(f"there is no file {place} for --answers")
    if args.context < LEAST_CONTEXT:
        raise UsageError(f"--context is {args.context}; it must be at least {LEAST_CONTEXT}")
    if args.max_new_tokens >= args.context:
        raise UsageError(
            f"--max-new-tokens {args.max_new_tokens} leaves no room for a prompt in a --context of {args.context} tokens; "
            "raise --context, and sequence_length in training with it"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_with(args: argparse.Namespace, target: "Target") -> None:
    """Refuse what the target cannot do, before the corpus folder is touched."""
    from blockdraft.prompts import encode
    from blockdraft.training.data.synthesis import user_frame

    if args.context > target.context:
        raise UsageError(f"--context is {args.context}, but {target.name} reads {target.context} tokens; lower it")
    thinking = _thinking(args)
    if args.self_synthesize:
        user_frame(target, thinking)
    if args.prompts or thinking is not None:
        encode(target, "Hello", thinking=thinking)  # a template, and one that knows the mode


def _thinking(args: argparse.Namespace) -> bool | None:
    return {"on": True, "off": False, None: None}[args.thinking]


def plan(args: argparse.Namespace, given: "list[Given]", who: dict[str, object]) -> str:
    """What would be done, as text."""
    parts = [f"{len(given)} given prompts", f"{args.self_synthesize or 0} self-written messages ({args.kinds or KINDS})"]
    parts += [f"text of {place}" for place in args.text] + [f"answers of {file}" for file in args.answers]
    by = f"asked of {args.endpoint}" if args.endpoint else "answered here"
    return (
        f"{', '.join(parts)} to {args.out}\n"
        f"at most {args.max_new_tokens} tokens an answer, {args.slots} at a time, {by}, by {json.dumps(who)}"
    )


def fill(
    args: argparse.Namespace,
    target: "Target",
    corpus: "Corpus",
    params: "SamplingParams",
    given: "list[Given]",
    thinking: bool | None,
) -> None:
    """Take in what is there, answer the given prompts, then write messages and answer those."""
    from blockdraft.progress import Progress
    from blockdraft.training.data.answering import Answering, Question, Tally
    from blockdraft.training.data.questions import encoded

    take_in(args, target, corpus, given)
    tally = Tally()
    if args.endpoint:
        ask_server(args, target, corpus, params, given, tally)
    elif given or args.self_synthesize:
        with Progress("Answering", len(given) + (args.self_synthesize or 0), unit="prompts") as progress:
            asked = (Question(q.key, q.source, ids, q.licence) for q, ids in encoded(given, target, thinking, tally.dropped))
            answering = Answering(target, corpus, params, args.context, args.slots, tally)
            passes = [answering.given(asked)]
            if args.self_synthesize:
                first = max(0, corpus.last_written(args.seed) - IN_FLIGHT * args.slots)
                kinds = (args.kinds or KINDS).split(",")
                passes.append(answering.written(kinds, range(first, args.self_synthesize), args.seed, thinking))
            for _ in itertools.chain(*passes):
                progress.update(tally.answers)
                progress.note(tally.rate())
    if tally.answers or tally.dropped:
        print(f"blockdraft: {tally.summary()}", file=sys.stderr)


def take_in(args: argparse.Namespace, target: "Target", corpus: "Corpus", given: "list[Given]") -> None:
    """Rows that need no generation: answers made elsewhere, and text."""
    from blockdraft.training.data.exchange import read_answers
    from blockdraft.training.data.texts import text_rows

    added = missing = 0
    for file in args.answers:
        for found in read_answers(file, target, given, corpus.identity):
            if found is None:
                missing += 1
            elif found[0].key not in corpus.keys:
                corpus.take(*found)
                added += 1
    if args.answers:
        print(f"blockdraft: {added} answers taken in, {missing} to prompts that --prompts does not hold", file=sys.stderr)
    for row, licence in text_rows(args.text, target, args.context):
        if row.key not in corpus.keys:
            corpus.take(row, licence)
    corpus.seal()


def ask_server(
    args: argparse.Namespace,
    target: "Target",
    corpus: "Corpus",
    params: "SamplingParams",
    given: "list[Given]",
    tally: "Tally",
) -> None:
    """All given prompts, asked of a server; its key is read from OPENAI_API_KEY."""
    import asyncio

    from blockdraft.progress import Progress

    try:
        from blockdraft.training.data.endpoint import Endpoint
    except ImportError:
        raise UsageError("--endpoint needs httpx; install it with `pip install blockdraft[data]`") from None
    endpoint = Endpoint(args.endpoint, args.endpoint_model, os.environ.get("OPENAI_API_KEY", ""))

    async def asking() -> None:
        with Progress("Asking", len(given), unit="prompts") as progress:
            work = asyncio.create_task(endpoint.answer(target, corpus, given, params, args.context, args.slots, tally))
            while not work.done():
                await asyncio.wait({work}, timeout=0.5)
                progress.update(tally.answers)
                progress.note(tally.rate())
            await work

    try:
        asyncio.run(asking())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
