"""``blockdraft generate``: answer one prompt as it streams, or a file of prompts in batches."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.decoding.request import Request
    from blockdraft.drafters.base import Drafter
    from blockdraft.rules.sampling import SamplingParams
    from blockdraft.targets.target import Target


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="answer a prompt, or a file of prompts")
    parser.add_argument("prompt", nargs="?", help="a user's message; - reads it from stdin")
    parser.add_argument("--prompts", type=options.path, metavar="FILE.jsonl", help="rows with prompt, turns or messages")
    parser.add_argument("--method", default="dflash", choices=("dflash", "lookup", "ar"), help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--batch-size", type=options.positive, metavar="N", help="rows at a time with --prompts; default: 4")
    parser.add_argument("--stats", action="store_true", help="a line of statistics on stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    options.add_prompt(parser)
    options.add_sampling(parser, max_new_tokens=256)
    options.add_models(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.prompts is None):
        raise UsageError("give either a PROMPT or --prompts FILE.jsonl")
    if args.prompts is None and args.batch_size is not None:
        raise UsageError("--batch-size needs --prompts; a single prompt is one row")
    if args.prompt == "-":
        args.prompt = sys.stdin.read()
    if args.prompt is not None and not args.prompt.strip():
        raise UsageError("the prompt is empty; give at least one token of text")
    return _one(args) if args.prompts is None else _many(args)


def _one(args: argparse.Namespace) -> int:
    sampling = options.sampling(args)
    target, drafter = options.load(args)
    from blockdraft.decoding.decode import decode
    from blockdraft.decoding.request import Request
    from blockdraft.generation import completion
    from blockdraft.prompts import encode

    ids = encode(target, args.prompt, args.system, args.raw)
    request = Request(ids, sampling, target, 0, args.max_context)
    status = 0
    try:
        for _ in decode(target, drafter, [request], 1, args.block_size):
            _show(request, args.json)
    except KeyboardInterrupt:
        request.interrupt()
        _show(request, args.json)
        status = 130
    result = completion(request, target, drafter)
    print(json.dumps(result.as_dict(), ensure_ascii=False) if args.json else "")
    if args.stats:
        print(options.summary(result), file=sys.stderr)
    return status


def _show(request: "Request", silent: bool) -> None:
    if not silent:
        print(request.take_text(), end="", flush=True)


def _many(args: argparse.Namespace) -> int:
    from blockdraft.prompts import read_prompts

    if args.raw:
        raise UsageError("--raw has no effect with --prompts, whose rows are chat messages; leave one of them out")
    conversations = read_prompts(args.prompts)
    sampling = options.sampling(args)
    target, drafter = options.load(args)
    return _converse(args, sampling, conversations, target, drafter)


def _converse(
    args: argparse.Namespace,
    sampling: "SamplingParams",
    conversations: list[list[list[dict[str, str]]]],
    target: "Target",
    drafter: "Drafter | None",
) -> int:
    """Answer turn after turn of all conversations, batched; write each answer as soon as it and those before it are there."""
    from blockdraft.decoding.decode import decode
    from blockdraft.progress import Progress

    history: list[list[dict[str, str]]] = [[] for _ in conversations]
    done = status = 0
    with Progress("Answering", sum(len(turns) for turns in conversations), unit="prompts") as progress:
        for turn in range(max(len(turns) for turns in conversations)):
            requests: dict[int, Request] = {}
            for i in (i for i, turns in enumerate(conversations) if turn < len(turns)):
                history[i] += conversations[i][turn]
                request = _request(args, sampling, target, history[i], i, turn)
                if request is None:
                    status = 1  # said already; this conversation ends here
                    conversations[i] = conversations[i][:turn]
                else:
                    requests[i] = request
            pending = list(requests)
            try:
                for _ in decode(target, drafter, list(requests.values()), args.batch_size or 4, args.block_size):
                    while pending and requests[pending[0]].finish_reason is not None:
                        i = pending.pop(0)
                        history[i].append({"role": "assistant", "content": _write(args, requests[i], i, turn, target, drafter)})
                        done += 1
                        progress.update(done)
            except KeyboardInterrupt:
                for i in (i for i in pending if requests[i].output):
                    requests[i].interrupt()
                    _write(args, requests[i], i, turn, target, drafter)
                return 130
    return status


def _request(
    args: argparse.Namespace, sampling: "SamplingParams", target: "Target", messages: list[dict[str, str]], row: int, turn: int
) -> "Request | None":
    """The request of a row's turn; a first turn that cannot be asked stops the run before it begins, a later one only its row."""
    from blockdraft.decoding.request import Request
    from blockdraft.prompts import encode

    try:
        return Request(encode(target, messages, args.system), sampling, target, row, args.max_context)
    except UsageError as error:
        where = f"row {row} of {args.prompts}, turn {turn}: {error}"
        if turn == 0:
            raise UsageError(where) from error
        print(f"blockdraft: {where}", file=sys.stderr)
        return None


def _write(args: argparse.Namespace, request: "Request", row: int, turn: int, target: "Target", drafter: "Drafter | None") -> str:
    """One line of JSON for an answer; returns its text."""
    from blockdraft.generation import completion

    result = completion(request, target, drafter)
    print(json.dumps({"index": row, "turn": turn, **result.as_dict()}, ensure_ascii=False), flush=True)
    if args.stats:
        print(f"{row}: {options.summary(result)}", file=sys.stderr)
    return result.text
