"""``blockdraft chat``: a conversation in the terminal; both caches live on from turn to turn."""

import argparse
import sys
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.decoding.decode import Decoder
    from blockdraft.decoding.request import Request

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to the target")
    parser.add_argument("--method", default="dflash", choices=("dflash", "lookup", "ar"), help="default: %(default)s")
    parser.add_argument("--stats", action="store_true", help="a line of statistics after each answer, on stderr")
    options.add_prompt(parser)
    options.add_sampling(parser, max_new_tokens=512)
    options.add_models(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sampling = options.sampling(args)
    target, drafter = options.load(args)
    from blockdraft.decoding.decode import Decoder
    from blockdraft.decoding.request import Request
    from blockdraft.generation import completion
    from blockdraft.prompts import encode

    capacity = min(target.context, args.max_context or 8192)
    decoder = Decoder(target, drafter, 1, capacity, args.block_size)
    messages: list[dict[str, str]] = []
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{target.name}, {'autoregressive' if drafter is None else f'drafted by {drafter.name}'}. {HELP}", file=sys.stderr)
    while (line := _ask(interactive)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages.clear()
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            request = Request(encode(target, messages, args.system), sampling, target, 0, capacity)
        except UsageError as error:
            print(f"blockdraft: {error} (/reset begins anew)", file=sys.stderr)
            messages.pop()
            continue
        _answer(decoder, request)
        result = completion(request, target, drafter)
        messages.append({"role": "assistant", "content": result.text})
        if args.stats:
            print(options.summary(result), file=sys.stderr)
    return 0


def _answer(decoder: "Decoder", request: "Request") -> None:
    try:
        decoder.admit(request, reuse=True)
        while decoder.active:
            print(request.take_text(), end="", flush=True)
            decoder.round()
    except KeyboardInterrupt:
        request.interrupt()
        decoder.abandon()
    print(request.take_text())


def _ask(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
