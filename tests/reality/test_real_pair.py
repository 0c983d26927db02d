"""SmolLM2-135M-Instruct with the shipped drafter: lossless against transformers, and worth its time."""

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from blockdraft.decoding.decode import decode
from blockdraft.decoding.request import Request
from blockdraft.generation import completion
from blockdraft.rules.sampling import SamplingParams
from blockdraft.verification import TIE, first_difference, gaps_to_best, teacher_forced, verify_pair
from tests.reality.conftest import FULL

PROMPTS, TOKENS = (60, 128) if FULL else (6, 32)
ROOT = Path(__file__).resolve().parents[2]


def reference(plain, prompt, count):
    ids = torch.tensor([prompt])
    output = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


def test_greedy_fp32_equals_transformers(fp32_pair, plain, prompts):
    """Token for token, on an untouched copy of the model; near ties are the one excuse, counted and bounded."""
    target, drafter = fp32_pair
    params = SamplingParams(max_new_tokens=TOKENS)
    ties = rounds = tokens = 0
    for prompt in prompts[:PROMPTS]:
        request = Request(prompt, params, target)
        list(decode(target, drafter, [request]))
        expected = reference(plain, prompt, TOKENS)
        rounds, tokens = rounds + request.rounds, tokens + len(request.output) - 1
        if request.output != expected:
            assert first_difference(target, prompt, expected, request.output, params)[-1] < TIE
            ties += 1
    print(f"{min(PROMPTS, len(prompts))} prompts, {ties} near ties, acceptance length {tokens / rounds:.3f}")
    assert ties <= max(1, PROMPTS // 20)
    assert tokens / rounds > 1.3  # the drafter drafts


def test_batched_fp32_equals_single(fp32_pair, prompts):
    target, drafter = fp32_pair
    params = SamplingParams(max_new_tokens=24)
    rows, slots = (20, 16) if FULL else (6, 4)
    batched = [Request(prompt, params, target, row) for row, prompt in enumerate(prompts[:rows])]
    list(decode(target, drafter, batched, batch_size=slots))
    for request in batched:
        alone = Request(request.prompt, params, target)
        list(decode(target, drafter, [alone]))
        if request.output != alone.output:
            assert first_difference(target, alone.prompt, alone.output, request.output, params)[-1] < TIE


def test_sampled_fp32_equals_autoregressive(fp32_pair, prompts):
    target, drafter = fp32_pair
    params = SamplingParams(max_new_tokens=TOKENS // 2, temperature=0.8, top_p=0.95, seed=1)
    verdict = list(verify_pair(target, drafter, prompts[: PROMPTS // 3], params))[-1]
    assert verdict.lossless
    assert len(verdict.ties) <= 1


def test_bf16_within_epsilon_and_a_second_best_loop_is_not(bf16_pair, prompts):
    target, drafter = bf16_pair
    params = SamplingParams(max_new_tokens=TOKENS)
    verdict = list(verify_pair(target, drafter, prompts[: max(3, PROMPTS // 4)], params))[-1]
    print(f"epsilon {verdict.epsilon:.3g}, {verdict.flips} flips, {verdict.identical} of {verdict.prompts} identical")
    assert verdict.lossless
    request = Request(prompts[0], params, target)
    list(decode(target, drafter, [request]))
    logits = teacher_forced(target, request.ids, len(request.prompt), 1)
    second = logits.topk(2, dim=-1).indices[:, 1].tolist()
    assert float(gaps_to_best(logits, second).max()) > verdict.epsilon


def test_the_first_token_comes_from_the_prompts_pass(fp32_pair, prompts):
    target, drafter = fp32_pair
    request = Request(prompts[0], SamplingParams(max_new_tokens=1), target)
    rounds = list(decode(target, drafter, [request]))
    assert [round.prefill for round in rounds] == [True]
    assert completion(request, target, drafter).acceptance_length is None


def test_plain_decoding_is_a_lean_baseline(fp32_pair, plain, prompts):
    """T28: a speed-up over ``ar`` means something only if ``ar`` is not slower than ``transformers.generate``."""
    target, ids = fp32_pair[0], prompts[0]
    tensor = torch.tensor([ids])

    def seconds(run):
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def theirs():
        plain.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=24, min_new_tokens=24, do_sample=False)

    def ours():
        list(decode(target, None, [Request(ids, SamplingParams(max_new_tokens=24, ignore_eos=True), target)]))

    theirs(), ours()
    ratios = [seconds(theirs) / seconds(ours) for _ in range(5)]
    print(f"transformers.generate / ar: {sorted(ratios)}")
    assert statistics.median(ratios) > 0.98


def test_the_readme_works():
    """Its Python block runs as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()


def test_the_command_line_with_all_defaults():
    command = [sys.executable, "-m", "blockdraft", "generate", "What is the capital of France?", "--max-new-tokens", "12", "--json"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert result["drafter"] == "smollm2-135m-dflash"
    assert "Paris" in result["text"]
