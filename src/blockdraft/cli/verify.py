"""``blockdraft verify``: prove on this machine that a drafter does not change what the target says."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from blockdraft.targets.target import Target
    from blockdraft.verification import Verdict

OWN = 24  # of our own prompts, four of each kind: half a minute


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("verify", help="prove that the drafter changes nothing")
    parser.add_argument("--prompts", type=options.path, metavar="FILE.jsonl", help="default: prompts of our own")
    parser.add_argument("--limit", type=options.positive, metavar="N", help="first N prompts; default: all, 24 of our own")
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object on stdout")
    options.add_sampling(parser, max_new_tokens=64)
    options.add_models(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from blockdraft.prompts import OWN_PROMPTS, encode, read_prompts
    from blockdraft.verification import verify_pair

    params = options.sampling(args)
    if args.stop:
        raise UsageError("--stop has no effect on the tokens that verify compares; leave it out")
    if not params.greedy and params.acceptance == "rejection":
        raise UsageError("the rejection rule is exact in law, not token by token: verify compares under --acceptance match")
    limit = args.limit or (None if args.prompts else OWN)
    conversations = read_prompts(args.prompts or OWN_PROMPTS)[:limit]
    target, drafter = options.load(args)
    assert drafter is not None
    if target.dtype.itemsize < 4 and not target.exact and not (params.greedy and params.repetition_penalty == 1.0):
        raise UsageError("outputs that are sampled or penalised are compared token by token in float32 only; add --dtype float32")
    from blockdraft.progress import Progress

    prompts = [encode(target, turns[0]) for turns in conversations]
    verdict = None
    with Progress("Verifying", len(prompts), unit="prompts") as progress:
        for verdict in verify_pair(target, drafter, prompts, params, args.block_size):
            progress.update(verdict.prompts)
    assert verdict is not None
    source = str(args.prompts) if args.prompts else "prompts of our own"
    report(verdict, target, source, args.json)
    return 0 if verdict.lossless else 1


def report(verdict: "Verdict", target: "Target", source: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"lossless": verdict.lossless, "prompts_from": source, **vars(verdict)}))
        return
    word = "LOSSLESS" if verdict.lossless else "NOT LOSSLESS"
    tau = f"{verdict.acceptance_length:.2f}" if verdict.acceptance_length else "none"
    print(
        f"{word}: {verdict.prompts} prompts ({source}), {verdict.tokens} tokens, {verdict.rounds} rounds, acceptance length {tau}"
    )
    print(f"identical to the target alone: {verdict.identical} of {verdict.prompts}")
    if verdict.rule == "epsilon":
        print(
            f"every token within epsilon {verdict.epsilon:.3g} of the best logit: {'no' if verdict.failures else 'yes'}; "
            f"{verdict.flips} tokens are not the best one, by rounding"
        )
    for name, places in (("near tie", verdict.ties), ("FAILURE", verdict.failures)):
        for prompt, at, reference, token, gap in places:
            words = [target.tokenizer.decode([t]) if t >= 0 and target.tokenizer else "" for t in (reference, token)]
            print(f"{name}: prompt {prompt}, token {at}: {words[0]!r} against {words[1]!r}, gap {gap:.3g}")
    if verdict.rounds == 0:
        print("blockdraft: nothing was drafted, so nothing is proved; raise --max-new-tokens", file=sys.stderr)
