"""One peer of ``peers.py``: loads, then answers a line of JSON with a line of JSON until its input ends.

{"ids": [...], "tokens": 128}  ->  {"ids": [...], "seconds": 1.23, "rounds": 40 or null}
"""

import json
import sys
import time
from pathlib import Path


def ours(method, options):
    from blockdraft import load_drafter, load_target
    from blockdraft.bench.methods import make_method
    from blockdraft.sampling import SamplingParams

    target = load_target(options["name"], options["dtype"])
    drafters = [] if method in ("ar", "hf") else [load_drafter(options["drafter"], target)]
    made = make_method(method, target, drafters, options["name"])

    def answer(ids, tokens):
        found = made.answer([ids], SamplingParams(max_new_tokens=tokens))[0]
        return found.ids, found.rounds or None

    return answer


def official(options):
    """The dflash package's own loop (``dflash_generate``) over a plain transformers model."""
    import torch
    from dflash.model import DFlashDraftModel, dflash_generate
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(options["target"], dtype=dtype).eval()
    drafter = DFlashDraftModel.from_pretrained(options["drafter"], dtype=dtype).eval()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    passes = [0]
    model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def answer(ids, tokens):
        passes[0] = 0
        with torch.inference_mode():
            out = dflash_generate(drafter, model, torch.tensor([ids]), max_new_tokens=tokens, stop_token_ids=ends)
        return out[0, len(ids) :].tolist(), passes[0] - 1

    return answer


def vllm(method, options):
    from vllm import LLM, SamplingParams

    extra = {}
    if method == "vllm-dflash":
        slots = json.loads(Path(options["drafter"], "config.json").read_text())["block_size"] - 1
        # Compiling the drafter for a CPU was not done after four minutes, with the compiler's own errors in between.
        extra["enforce_eager"] = True
        extra["speculative_config"] = {"method": "dflash", "model": options["drafter"], "num_speculative_tokens": slots}
    engine = LLM(options["target"], dtype=options["dtype"], max_model_len=2048, max_num_seqs=1, disable_log_stats=False, **extra)

    def drafts():
        found = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
        return found.get("vllm:spec_decode_num_drafts")

    def answer(ids, tokens):
        before = drafts()
        params = SamplingParams(temperature=0, max_tokens=tokens)
        out = engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        after = drafts()
        return list(out.token_ids), after - before if extra and after is not None else None

    return answer


def main() -> None:
    method, options = sys.argv[1], json.loads(sys.argv[2])
    if method.startswith("vllm"):
        answer = vllm(method, options)
    else:
        answer = official(options) if method == "official-dflash" else ours(method, options)
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        ids, rounds = answer(asked["ids"], asked["tokens"])
        print(json.dumps({"ids": ids, "seconds": time.perf_counter() - began, "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
