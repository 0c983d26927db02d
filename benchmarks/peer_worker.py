"""One peer of ``peers.py``: loads, then answers a line of JSON with a line of JSON until its input ends.

{"ids": [...], "tokens": 128}  ->  {"ids": [...], "seconds": 1.23, "rounds": 40 or null}
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path


def ours(method, options):
    from blockdraft import load_drafter, load_target
    from blockdraft.bench.methods import make_method
    from blockdraft.rules.sampling import SamplingParams

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


def folder(options):
    """transformers' own generation with a drafter folder in its own layout, loaded as anybody would."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(options["target"], dtype=dtype).eval()
    drafter = AutoModel.from_pretrained(options["drafter"], dtype=dtype).eval()
    model.generation_config.speculation_type = "dflash"
    passes = [0]
    drafter.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def answer(ids, tokens):
        passes[0] = 0
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), assistant_model=drafter, max_new_tokens=tokens, do_sample=False)
        return out[0, len(ids) :].tolist(), passes[0]

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

    def counted():
        found = {m.name: getattr(m, "value", 0) for m in engine.get_metrics()}
        return [found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens")]

    def answer(ids, tokens):
        before = counted()
        params = SamplingParams(temperature=0, max_tokens=tokens)
        out = engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]
        drafts, accepted = (b - a for a, b in zip(before, counted(), strict=True))
        # It may draft once more behind the end: what was accepted per draft is the same for all that.
        return list(out.token_ids), (drafts / (drafts + accepted) * (len(out.token_ids) - 1)) if drafts else None

    return answer


def llama(method, options):
    """llama.cpp's server on the loopback interface, in this process group, so that it is held and ended with this worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [options["server"], "-m", options["target"], "--host", "127.0.0.1", "--port", str(port), "-c", "2048", "-np", "1"]
    command += ["-t", str(os.cpu_count()), "-ctk", "f32", "-ctv", "f32", "-fa", "off"]  # the cache is half precision by default
    if method == "llama-dflash":
        command += ["-md", options["drafter"], "--spec-type", "draft-dflash", "--spec-draft-n-max", options["slots"]]
        command += ["-ctkd", "f32", "-ctvd", "f32"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    last = deque(maxlen=5)
    threading.Thread(target=lambda: last.extend(server.stderr), daemon=True).start()

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    while True:
        if server.poll() is not None:
            raise SystemExit("".join(last) or f"{options['server']} ended with status {server.returncode}")
        try:
            ask("/health")
            break
        except OSError:  # not yet listening, or loading
            time.sleep(0.2)

    def answer(ids, tokens):
        wanted = {"prompt": ids, "n_predict": tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        found = ask("/completion", wanted)
        told = found["timings"]
        # The first token needs no round, an accepted one no round of its own.
        return found["tokens"], len(found["tokens"]) - 1 - told["draft_n_accepted"] if "draft_n" in told else None

    return answer


def main() -> None:
    method, options = sys.argv[1], json.loads(sys.argv[2])
    if method.startswith("vllm"):
        answer = vllm(method, options)
    elif method.startswith("llama"):
        answer = llama(method, options)
    elif method == "hf-folder":
        answer = folder(options)
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
