"""How much longer a decoding round takes than the forward passes in it.

    python benchmarks/loop.py [--drafter FOLDER] [--tree N] [--data-dir DIR] [--limit 3] [--tokens 96] [--dtype float32]

Answers GSM8K prompts one at a time, greedy, and times every pass of target and drafter where it happens: the target's forward; a
drafter's network, its fusion of features, and its head. What is left of a round is the loop: acceptance, caches, bookkeeping.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockdraft import SamplingParams, load_drafter, load_target
from blockdraft.bench.tasks import read_tasks
from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3Drafter
from blockdraft.generation import with_tree
from blockdraft.prompts import encode


class Stopwatch:
    """Seconds in the functions that it was put around; a call within another counts once."""

    def __init__(self) -> None:
        self.seconds, self._running = 0.0, False

    def put_around(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return work(*args, **kwargs)
            self._running, began = True, time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._running = False
                self.seconds += time.perf_counter() - began

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="folder; default: the one shipped for the target")
    parser.add_argument("--tree", type=int, metavar="N", help="candidates; default: a chain")
    parser.add_argument("--data-dir", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=3, help="prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    target = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, target)
    watch = Stopwatch()
    watch.put_around(target, "_forward")
    if isinstance(drafter, Eagle3Drafter):
        watch.put_around(drafter.network, "forward", "logits")
        watch.put_around(drafter.network.fc, "forward")
    elif isinstance(drafter, DFlashDrafter):
        watch.put_around(drafter, "_hidden", "_logits", "_inject")
    else:
        sys.exit(f"loop.py: {args.drafter} is neither a DFlash nor an EAGLE-3 drafter")
    method = with_tree(target, drafter, args.tree or "off")
    assert method is not None
    (task,) = read_tasks(["gsm8k"], args.data_dir, args.limit)
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    times: list[tuple[float, float]] = []  # of each round: all of it, and its passes
    for warm, conversation in [(False, task.conversations[0]), *((True, found) for found in task.conversations)]:
        watch.seconds = 0.0
        for round in decode(target, method, [Request(encode(target, conversation[0]), params, target)]):
            if warm and not round.prefill:
                times.append((round.seconds, watch.seconds))
            watch.seconds = 0.0
    report(method.method, times)


def report(method: str, times: list[tuple[float, float]]) -> None:
    rounds, passes = (1e3 * statistics.mean(found) for found in zip(*times, strict=True))
    figures = {"rounds": len(times), "round_ms": round(rounds, 2), "passes_ms": round(passes, 2)}
    print(json.dumps({"method": method, **figures, "round_over_passes": round(rounds / passes, 3)}))


if __name__ == "__main__":
    main()
