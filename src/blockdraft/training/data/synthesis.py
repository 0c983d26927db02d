"""Self-synthesis: an instruction-tuned target writes the user's messages itself (Magpie, arXiv 2406.08464).

The chat template's user header is fed to the target, which goes on as if it were the user. An opening phrase steers the kind
of message; without one a small model asks mostly for the same few things.
"""

import random
from collections import Counter
from typing import Any

from blockdraft.errors import UsageError
from blockdraft.targets.target import Target

# Opening phrases of users' messages, by kind.
OPENINGS: dict[str, list[str]] = {
    "mathematics": (
        "Solve|What is the value of|A farmer has|A train travels|Find the area of|Calculate the|If x|"
        "A rectangle has|How many ways|A store sells|What is the probability|Simplify the expression|"
        "The sum of two numbers|Convert|There are|A car|Prove that|Find the|Tom has|Maria bought|Each day|"
        "What percent of|Evaluate|Factor"
    ).split("|"),
    "code": (
        "Write a Python function|Write a function that takes|Write a Python program|Fix the bug in this code:|"
        "Write a class|Explain what this Python code does:|Write a SQL query|Write a JavaScript function|"
        "How do I sort a list|Write a recursive function|Write a bash script|Implement|"
        "Complete the following function:\n\ndef |Write unit tests for|How can I read a file|"
        "Write a regular expression|Create a function to|Convert this code to|Write code to count|def |"
        "Write an algorithm|Using pandas,|Write a C program|What is the output of"
    ).split("|"),
    "conversation": (
        "I feel|Can you tell me about|What do you think|My friend|I'm planning|Why do people|Who was|Tell me|"
        "Do you know|Hi,|I was wondering|What happened|Have you ever|Could you explain|How does|What are some|"
        "I need advice|Should I|What would happen if|Is it true that|Imagine|Describe|Compare|Pretend you are"
    ).split("|"),
    "instruction": (
        "Write a short story|Summarize|Give me a recipe|Write an email|List five|Translate|"
        "Rewrite the following sentence|Write a poem|Create a plan|Edit this paragraph:|Suggest|"
        "Classify the following|Give three examples|Make a list|Write a product description|Explain how to|"
        "Write a letter|Generate a title|Identify the|Write a review|Turn this into|Extract|"
        "Write instructions|Create an outline"
    ).split("|"),
}


def user_frame(target: Target, thinking: bool | None = None) -> tuple[list[int], list[int]]:
    """Token ids of the chat template in front of the user's first message, and behind it up to where the answer begins.

    Raises:
        UsageError: the target has no chat template, or one that does not show the user's message as it is.
    """
    tokenizer, mark = target.tokenizer, "MESSAGE OF THE USER"
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{target.name} has no chat template, so it cannot write users' messages; give --prompts")
    messages = [{"role": "user", "content": mark}]
    modes: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **modes))
    if mark not in text:
        raise UsageError(f"the chat template of {target.name} hides the user's message; give --prompts")
    before, _, behind = text.partition(mark)
    header, tail = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, behind))
    return header, tail


def message_text(target: Target, frame: tuple[list[int], list[int]], prompt: list[int]) -> str:
    """What the user said in a prompt of one message."""
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(prompt[len(frame[0]) : len(prompt) - len(frame[1])], skip_special_tokens=True))


def opening_of(kinds: list[str], seed: int, number: int) -> tuple[str, str]:
    """Kind and opening phrase of a message: kinds in turn, phrases at random; one in five is left free, as conversation."""
    chance = random.Random(f"{seed}/{number}")
    kind = kinds[number % len(kinds)]
    return ("conversation", "") if chance.random() < 0.2 else (kind, chance.choice(OPENINGS[kind]))


def loop_share(ids: list[int], width: int = 8) -> float:
    """Share of the n-grams of a text that it has said before: near 1 for a degenerate loop."""
    grams = Counter(tuple(ids[i : i + width]) for i in range(len(ids) - width + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


def loops(ids: list[int], longest: int = 96, least: int = 48) -> bool:
    """Whether a text ends in a loop: its last tokens, at least ``least`` and two periods, repeat those one period earlier."""
    for period in range(1, min(longest, len(ids) // 3) + 1):
        length = max(least, 2 * period)
        if ids[-1] == ids[-1 - period] and length + period <= len(ids) and ids[-length:] == ids[-length - period : -period]:
            return True
    return False
