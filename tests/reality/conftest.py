"""The real target and its shipped drafter; prompts from the evaluation sets where they are, else our own."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft import load_drafter, load_target
from blockdraft.prompts import OWN_PROMPTS, encode
from blockdraft.store import obtain

EVALUATION = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"
FULL = os.environ.get("BLOCKDRAFT_REALITY") == "full"


def rows() -> tuple[str, list[str]]:
    """Where prompts come from, and first turns, one task after the other in turn."""
    if EVALUATION.is_dir():
        tasks = [
            [json.loads(line)["turns"][0] for line in file.read_text().splitlines()] for file in sorted(EVALUATION.glob("*.jsonl"))
        ]
        return f"evaluation sets in {EVALUATION.parent.parent.name}/", [task[i] for i in range(10) for task in tasks]
    return "prompts of our own", [json.loads(line)["prompt"] for line in OWN_PROMPTS.read_text().splitlines()]


def pytest_report_header() -> str:
    return f"reality: {'full' if FULL else 'short'} run, {rows()[0]}"


@pytest.fixture(scope="session")
def fp32_pair():
    target = load_target("smollm2-135m", dtype="float32")
    return target, load_drafter(None, target)


@pytest.fixture(scope="session")
def bf16_pair():
    target = load_target("smollm2-135m", dtype="bfloat16")
    return target, load_drafter(None, target)


@pytest.fixture(scope="session")
def plain():
    """The same weights in a model that blockdraft never touches."""
    return AutoModelForCausalLM.from_pretrained(obtain("smollm2-135m"), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(fp32_pair):
    return [encode(fp32_pair[0], text) for text in rows()[1]]
