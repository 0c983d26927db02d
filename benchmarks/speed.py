"""Speed of plain decoding against transformers, of DFlash against plain decoding, and what a round costs beside the models.

    python benchmarks/speed.py [--dtype bfloat16] [--prompts 12] [--tokens 128] [--repeats 5] [--block-size N] [--out FILE.json]

Prompts: GSM8K of the evaluation data beside the project where it is, else our own. All runs of a comparison are paired and
interleaved, in one process with nothing else running; the first run of each kind is a warm-up and thrown away.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from blockdraft import load_drafter, load_target
from blockdraft.decode import decode
from blockdraft.prompts import OWN_PROMPTS, encode
from blockdraft.request import Request
from blockdraft.sampling import SamplingParams
from blockdraft.store import obtain

EVALUATION = Path(__file__).resolve().parents[2] / "shared" / "data" / "eval" / "gsm8k.jsonl"


def prompts() -> tuple[str, list[str]]:
    if EVALUATION.exists():
        return "GSM8K", [json.loads(line)["turns"][0] for line in EVALUATION.read_text().splitlines()]
    return "own prompts", [json.loads(line)["prompt"] for line in OWN_PROMPTS.read_text().splitlines()]


def timed(target, drafter, ids, tokens, block_size=None, ignore_eos=False):
    """Decode once: seconds per token after the first, the request, and its rounds."""
    request = Request(ids, SamplingParams(max_new_tokens=tokens, ignore_eos=ignore_eos), target)
    rounds = [round for round in decode(target, drafter, [request], 1, block_size) if not round.prefill]
    return request.decode_seconds / (len(request.output) - 1), request, rounds


def against_transformers(target, plain, ids, tokens, repeats):
    """Milliseconds per token end to end (prefill included on both sides), paired; plain is an untouched transformers model."""
    tensor = torch.tensor([ids])

    def hf():
        began = time.perf_counter()
        plain.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return time.perf_counter() - began

    def ours():
        began = time.perf_counter()
        timed(target, None, ids, tokens, ignore_eos=True)
        return time.perf_counter() - began

    pairs = [(hf(), ours()) for _ in range(repeats + 1)][1:]
    medians = [statistics.median(pair[side] for pair in pairs) for side in (0, 1)]
    return {
        "transformers_ms_per_token": 1e3 * medians[0] / tokens,
        "ar_ms_per_token": 1e3 * medians[1] / tokens,
        "ratio_of_medians": medians[0] / medians[1],
        "ratios": [a / b for a, b in pairs],
    }


def against_ar(target, drafter, encoded, tokens, block_size):
    """Paired speed-ups prompt by prompt, acceptance, and the time split of a round."""
    ratios, rounds, emitted, same = [], [], 0, 0
    slow_ms, fast_ms, seconds = [], [], [0.0, 0.0]
    for ids in encoded:
        order = [None, drafter]
        random.shuffle(order)
        result = {one is None: timed(target, one, ids, tokens, block_size if one else None) for one in order}
        (slow, plain, _), (fast, drafted, its_rounds) = result[True], result[False]
        ratios.append(slow / fast)
        slow_ms.append(1e3 * slow)
        fast_ms.append(1e3 * fast)
        seconds[0] += plain.decode_seconds
        seconds[1] += drafted.decode_seconds
        rounds += its_rounds
        emitted += len(drafted.output) - 1
        same += plain.output == drafted.output
    split = {name: 1e3 * statistics.median(getattr(round, f"{name}_seconds") for round in rounds) for name in ("draft", "verify")}
    split["other"] = 1e3 * statistics.median(r.seconds - r.draft_seconds - r.verify_seconds for r in rounds)
    return {
        "prompts": len(encoded),
        "speedup_median": statistics.median(ratios),
        "speedup_total_time": seconds[0] / seconds[1],
        "ar_ms_per_token": statistics.median(slow_ms),
        "dflash_ms_per_token": statistics.median(fast_ms),
        "acceptance_length": emitted / len(rounds),
        "identical_to_ar": same / len(encoded),
        "round_ms": split,
        "speedups": ratios,
    }


def start_up(dtype):
    """Seconds from process start to the first token, everything cached; the second of two starts."""
    command = [sys.executable, "-m", "blockdraft", "generate", "Hello", "--max-new-tokens", "1", "--dtype", dtype]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return seconds[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafter")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random.seed(0)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    first_token = start_up(args.dtype)
    began = time.perf_counter()
    target = load_target("smollm2-135m", dtype=args.dtype)
    load_seconds = time.perf_counter() - began
    drafter = load_drafter(args.drafter, target)
    plain = AutoModelForCausalLM.from_pretrained(obtain("smollm2-135m"), dtype=target.dtype).eval()
    source, texts = prompts()
    encoded = [encode(target, text) for text in texts[: args.prompts]]
    for warm in (None, drafter):
        timed(target, warm, encoded[0], 24)
    report = {
        "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "settings": {
            "dtype": args.dtype,
            "prompts": source,
            "tokens": args.tokens,
            "drafter": drafter.name,
            "block_size": args.block_size or drafter.block_size,
        },
        "load_target_s": load_seconds,
        "process_to_first_token_s": first_token,
        "ar_against_transformers": against_transformers(target, plain, encoded[0], args.tokens, args.repeats),
        "dflash_against_ar": against_ar(target, drafter, encoded, args.tokens, args.block_size),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
