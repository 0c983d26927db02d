"""What the loss of a training step takes, by the kernel and by autograd, in turn in one process.

python benchmarks/loss.py    (a step of 300 blocks of 8 over 5,000 words, half cross entropy, half KL, D-PACE, bfloat16)
"""

import time
from statistics import median

import torch

from blockdraft.engine.kernels import use_kernels
from blockdraft.training import loss
from blockdraft.training.loss import LossRule, Words, block_loss

BLOCKS, SLOTS, HIDDEN, WORDS = 300, 7, 576, 5000
RUNS = 8
CASES = {"kernel, chunks of 16 MB": (True, 16), "autograd, 16 MB": (False, 16), "autograd, 48 MB": (False, 48)}


def main() -> None:
    torch.manual_seed(0)
    words = Words((torch.randn(WORDS, HIDDEN) * 0.05).bfloat16(), ids=torch.arange(WORDS))
    hidden, teacher = (torch.randn(BLOCKS, SLOTS, HIDDEN).bfloat16() for _ in range(2))
    labels, valid = torch.randint(WORDS, (BLOCKS, SLOTS)), torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    rule = LossRule(ce_weight=0.5, kl_weight=0.5, dpace=0.5)
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS + 1):  # the first of each is a warm-up
        for name, (kernel, megabytes) in CASES.items():
            use_kernels(kernel)
            loss.CHUNK_BYTES["cpu"] = megabytes << 20
            began = time.perf_counter()
            block_loss(hidden.requires_grad_(), labels, valid, teacher, words, rule)[0].backward()
            taken[name].append(time.perf_counter() - began)
            hidden.grad = None
    for name, seconds in taken.items():
        print(f"{name}: {median(seconds[1:]) * 1e3:.0f} ms (least {min(seconds[1:]) * 1e3:.0f})")


if __name__ == "__main__":
    main()
