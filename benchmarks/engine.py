"""The engine's own limit: rounds at a forced acceptance, against the bytes of the weights that a round must read.

    python benchmarks/engine.py                      (one GPU: a target and a drafter of Qwen3-8B's shape with random weights)
    python benchmarks/engine.py --tiny --device cpu  (that the script runs)

The drafter computes its block as ever; then its tokens are replaced by the target's continuation, each with the set accuracy. So
rounds cost what they cost with a trained drafter of that accuracy, without one. "limit" is the time to read target and drafter
once at the bandwidth that a copy reaches on this device.
"""

import argparse
import json
import random
import statistics
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.formats.zlab import default_taps
from blockdraft.rules.proposal import Proposal
from blockdraft.rules.sampling import SamplingParams
from blockdraft.targets.target import Target
from blockdraft.verification import own_reference

QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BLOCK = 16


class Forced(DFlashDrafter):
    """Drafts, and then says what the target will say, as often as it is told to be right."""

    def script(self, text: list[int], accuracy: float) -> None:
        self.text, self.accuracy, self.chance, self.seen = text, accuracy, random.Random(0), 0

    def observe(self, row, tokens, features, counts):  # type: ignore[no-untyped-def]
        super().observe(row, tokens, features, counts)
        self.seen += counts[0]

    def propose(self, anchors, widths, draw):  # type: ignore[no-untyped-def]
        drafted = super().propose(anchors, widths, draw)
        truth = self.text[self.seen + 1 : self.seen + widths[0]]
        said = [t if self.chance.random() < self.accuracy else (t + 1) % 100 for t in truth]
        said += [0] * (widths[0] - 1 - len(said))
        return Proposal(torch.tensor([said], device=anchors.device).view_as(drafted.tokens), drafted.widths)


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = (4 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(6)]
    return 2 * size / min(times[1:])


def seconds(work, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bytes_of(module: torch.nn.Module, without: torch.nn.Module | None = None) -> int:
    left_out = {id(p) for p in without.parameters()} if without is not None else set()
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--accuracies", default="0.6,0.8,0.9")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = TINY if args.tiny else QWEN3_8B
    with torch.device(device):
        config = Qwen3Config(**shape, max_position_embeddings=4096, tie_word_embeddings=False)
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
        layers = shape["num_hidden_layers"]
        taps = tuple(default_taps(layers, 5)) if layers > 5 else (0, 1)
        backbone = Qwen3Config(**{**shape, "num_hidden_layers": 5}, max_position_embeddings=4096)
        drafting = DFlashConfig(backbone, BLOCK, 7, taps, layers, (False,) * 5, (None,) * 5)
        network = DFlash(drafting).to(dtype)
    target = Target(model, name="random")
    drafter = Forced(network, target.embed, target.head)
    prompt = torch.randint(8, 100, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    speed = bandwidth(device)
    read = bytes_of(model, model.get_input_embeddings())
    drafted = read + bytes_of(network) + bytes_of(model.get_output_embeddings())  # the head is read for the draft too
    report("ar", run(target, None, prompt, params), read / speed)
    text = prompt + own_reference(target, prompt, params)
    for accuracy in map(float, args.accuracies.split(",")):
        drafter.script(text, accuracy)
        measured = run(target, drafter, prompt, params, text)
        report(f"dflash, accuracy {accuracy}", measured, drafted / speed)


def run(
    target: Target, drafter: Forced | None, prompt: list[int], params: SamplingParams, text: list[int] | None = None
) -> tuple[list[float], float]:
    """Seconds of each round, and tokens per round; the second of two runs. Says how long the output follows ``text``."""
    for _ in range(2):
        if drafter is not None:
            drafter.seen = 0
        request, times = Request(prompt, params, target), []
        for found in decode(target, drafter, [request]):
            if not found.prefill:
                times.append(found.seconds)
    said = prompt + request.output
    if text is not None and said != text:  # in bfloat16 a near tie may fall otherwise, and nothing drafted behind it is right
        at = next(i for i, pair in enumerate(zip(said, text, strict=True)) if pair[0] != pair[1])
        print(f"the output leaves the script at token {at - len(prompt)} of {len(request.output)}", file=sys.stderr)
    return times, (len(request.output) - 1) / len(times)


def report(name: str, measured: tuple[list[float], float], limit: float) -> None:
    times, tokens = measured
    middle = statistics.median(times)
    print(
        json.dumps(
            {
                "method": name,
                "tokens_per_round": round(tokens, 2),
                "round_ms": round(1e3 * middle, 3),
                "limit_ms": round(1e3 * limit, 3),
                "share_of_limit": round(limit / middle, 3),
                "tokens_per_second": round(tokens / middle, 1),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
