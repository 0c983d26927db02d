"""Prompts: text, chat messages or JSONL rows to the token ids a target reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from blockdraft.errors import UsageError
from blockdraft.targets.target import Target

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")  # written for this project, always installed
Message = dict[str, str]
Prompt = str | Sequence[Message] | Sequence[int]


class PromptRefused(UsageError):
    """These messages cannot be encoded for this target; others can."""


def encode(target: Target, prompt: Prompt, system: str | None = None, raw: bool = False, thinking: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        target: whose tokenizer and chat template apply.
        prompt: text (a user's message), a list of chat messages, or token ids, which pass through.
        system: a system message before the others.
        raw: tokenize the text as it is, without the chat template.
        thinking: the template's ``enable_thinking``; None leaves it to the template.

    Raises:
        UsageError: an empty prompt, a target without tokenizer or template, or an option that cannot take effect.
        PromptRefused (a UsageError): the template refuses these messages, or they are no text.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token of text")
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        if system is not None:
            raise UsageError("a system message cannot be put before a prompt of token ids")
        return list(prompt)  # type: ignore[arg-type]
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; give token ids")
    if raw:
        if not isinstance(prompt, str) or system is not None:
            raise UsageError("without the chat template a prompt is one text, with no roles and no system message")
        return list(tokenizer(_encodable(prompt))["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{target.name} has no chat template; continue plain text with --raw")
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if isinstance(prompt, str) and not prompt.strip():
        raise UsageError("the prompt is empty; give at least one token of text")
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if system is not None and sum(message["role"] == "system" for message in messages) > 1:
        raise UsageError("--system is given, and the messages have a system message of their own; leave one of them out")
    for message in messages:
        _encodable(message["content"])
    modes: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    if modes and "enable_thinking" not in str(tokenizer.chat_template):
        raise UsageError(f"the chat template of {target.name} knows no thinking mode; leave --thinking out")
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **modes)
    except TemplateError as error:
        raise PromptRefused(f"the chat template of {target.name} refuses these messages: {error}") from error
    return list(ids)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptRefused(f"the prompt {text[:40]!r} holds bytes that are no UTF-8 text; mend its encoding") from None
    return text


def read_prompts(path: Path) -> list[list[list[Message]]]:
    """Conversations of a JSONL file: for each row the turns, each a list of messages to add before an answer.

    A row has ``prompt`` (one user message), ``turns`` (user messages, each answered in its turn) or ``messages``.

    Raises:
        UsageError: no such file, or a row that is none of these; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also part at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = [_checked(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UsageError(f"{path} has no prompts")
    return rows


def _checked(path: Path, number: int, line: str) -> list[list[Message]]:
    turns = _turns(path, number, line)
    try:
        for message in (message for turn in turns for message in turn):
            _encodable(message["role"])
            _encodable(message["content"])
    except UsageError as error:
        raise UsageError(f"{path}, line {number}: {error}") from None
    return turns


def _turns(path: Path, number: int, line: str) -> list[list[Message]]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number may have too many digits, a list too many levels
        raise UsageError(f"{path}, line {number}: not valid JSON ({error})") from error
    if isinstance(row, dict):
        if isinstance(row.get("prompt"), str) and row["prompt"].strip():
            return [[{"role": "user", "content": row["prompt"]}]]
        turns = row.get("turns")
        if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
            return [[{"role": "user", "content": turn}] for turn in turns]
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages) and messages[-1]["content"].strip():
            return [messages]
    raise UsageError(f"{path}, line {number}: a row needs a non-empty 'prompt', 'turns' or 'messages'")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
