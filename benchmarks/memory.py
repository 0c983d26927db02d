"""Resident memory that each method takes beyond plain decoding, as the system counts it.

    python benchmarks/memory.py [--methods eagle3,eagle3-tree,dflash,dflash-tree] [--drafter FOLDER ...] [--tokens 128] [--json]

Each method runs in a process of its own on one prompt of our own. There the target answers plainly until its memory stands still;
then the drafter is loaded and answers. Held: what the process has more of when both rest, weights and caches. Workspace: how far
the process rose above that while it answered, less what plain decoding rose. Linux alone tells both; on a few megabytes the C
library's arenas have their own mind. About a quarter of a minute for each method.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from blockdraft import SamplingParams, load_drafter, load_target
from blockdraft.bench.methods import Method, make_method

HERE = Path(__file__).resolve().parent
METHODS = "lookup,eagle3,eagle3-tree,dflash,dflash-tree"
DRAFTERS = (HERE.parent / "src" / "blockdraft" / "shipped" / "smollm2-135m", HERE / "drafters" / "smollm2-135m-eagle3")
PROMPT = "Explain to a child how a bicycle stays upright, and name five things that can go wrong with one."
RUNS = 3  # answers before memory is read: caches are made at the first one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--drafter", action="append", metavar="FOLDER", help="default: both that come with blockdraft")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.methods.split(",")
    drafters = args.drafter or [str(folder) for folder in DRAFTERS]
    if len(names) > 1:
        found = measured(names, drafters, args.tokens, args.target, args.dtype)
    else:
        found = {names[0]: measure(args.target, names[0], drafters, args.tokens, args.dtype)}
    if args.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name:22} " + ", ".join(f"{key} {value / 1e6:.1f} MB" for key, value in figures.items()))


def measured(
    methods: list[str], drafters: list[str], tokens: int, target: str = "smollm2-135m", dtype: str = "float32"
) -> dict[str, dict[str, float]]:
    """Bytes by method and kind, each method in a process of its own."""
    found = {}
    for name in methods:
        command = [sys.executable, __file__, "--json", "--methods", name, "--tokens", str(tokens), "--target", target]
        command += ["--dtype", dtype, *(word for folder in drafters for word in ("--drafter", folder))]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found |= json.loads(run.stdout)
    return found


def measure(target_name: str, name: str, drafters: list[str], tokens: int, dtype: str) -> dict[str, float]:
    """Bytes held, of them those counted as tensors, and of the workspace of one method, all beyond plain decoding."""
    target = load_target(target_name, dtype=dtype)
    assert target.tokenizer is not None
    prompt = target.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)["input_ids"]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    plain = make_method("ar", target, [], target_name)
    resting, above = answered(plain, prompt, params)
    loaded = [load_drafter(folder, target) for folder in drafters]
    kind = name.partition("-tree")[0].partition(":")[0]
    own = [drafter for drafter in loaded if drafter.method == kind]
    del loaded
    method = make_method(name, target, own, target_name)
    held, rose = answered(method, prompt, params)
    return {"held": held - resting, "counted": float(method.extra_bytes or 0), "workspace": max(0.0, rose - above)}


def answered(method: Method, prompt: list[int], params: SamplingParams) -> tuple[float, float]:
    """Bytes resident when the method rests after some answers, and how far one more answer rose above them."""
    for _ in range(RUNS):
        method.answer([prompt], params)
    rested = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    method.answer([prompt], params)
    return rested, status("VmHWM") - rested


def resident() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def status(key: str) -> float:
    """A figure of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
