"""Throughput of making training data: answer tokens per second over a whole run, and where the time goes.

    python benchmarks/answers.py --prompts prompts.jsonl --answers 256 --slots 64

Real prompts, greedy answers, written to a corpus in a temporary folder, as `blockdraft data` does it.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from blockdraft.decoding.decode import Decoder
from blockdraft.load import load_target
from blockdraft.prompts import encode
from blockdraft.rules.sampling import SamplingParams
from blockdraft.training.data.answering import Answering, Question, Tally
from blockdraft.training.data.corpus import Corpus, identity
from blockdraft.training.data.questions import given_questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    given = given_questions([args.prompts], None, 0)[: args.answers]
    questions = (Question(q.key, q.source, encode(target, q.messages)) for q in given)
    spent = {"prompts": 0.0, "steps": 0.0}
    for name, method in (("prompts", Decoder.admit_all), ("steps", Decoder.round)):
        setattr(Decoder, method.__name__, clocked(method, spent, name))
    with tempfile.TemporaryDirectory() as folder:
        corpus, tally = Corpus(Path(folder), identity(target)), Tally()
        params = SamplingParams(max_new_tokens=args.max_new_tokens)
        for _ in Answering(target, corpus, params, 512, args.slots, tally).given(questions):
            pass
        seconds = time.perf_counter() - tally.began
    print(
        json.dumps(
            {
                "answer_tokens_per_second": round(tally.tokens / seconds, 1),
                "answers": tally.answers,
                "tokens_per_answer": round(tally.tokens / tally.answers, 1),
                "seconds": {**{k: round(v, 1) for k, v in spent.items()}, "all": round(seconds, 1)},
                "slot_steps_with_a_token": round(tally.token_steps / tally.slot_steps, 3),
                "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
                "dtype": str(target.dtype),
                "slots": args.slots,
                "threads": torch.get_num_threads(),
            }
        )
    )


def clocked(method, spent: dict[str, float], name: str):  # type: ignore[no-untyped-def]
    def run(self, *arguments):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        result = method(self, *arguments)
        spent[name] += time.perf_counter() - began
        return result

    return run


if __name__ == "__main__":
    main()
