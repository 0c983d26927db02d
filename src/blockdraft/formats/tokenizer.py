"""A target's tokenizer as GGUF keys: copied from the target's own GGUF file, or told from a byte-level ``tokenizer.json``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
from transformers import PreTrainedTokenizerFast

from blockdraft.errors import UsageError
from blockdraft.targets.target import Target

Fields = Callable[[gguf.GGUFWriter], None]
# How text is split before merges: llama.cpp knows the usual rules by name. The regular expressions are the tokenizers' own.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {LETTERS + r"\p{N}" + REST: "qwen2", LETTERS + r"\p{N}{1,3}" + REST: "llama-bpe"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def tokenizer_fields(target: Target) -> Fields:
    """What writes the tokenizer's keys into a file.

    Raises:
        UsageError: the target has no tokenizer, or one whose splitting rule is not known by name.
    """
    if target.name.endswith(".gguf") and Path(target.name).is_file():
        return _copied(Path(target.name))
    tokenizer = target.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"target {target.name} has no tokenizer.json, and a GGUF drafter holds its target's tokenizer")
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    rule = _rule(told)
    if told["model"]["type"] != "BPE" or rule is None:
        raise UsageError(
            f"the tokenizer of {target.name} splits text by a rule that has no known name in llama.cpp; give the target as a .gguf "
            "file, and its tokenizer is copied"
        )
    return _told(tokenizer, told, rule, target.embedding.num_embeddings)


def _copied(file: Path) -> Fields:
    reader = gguf.GGUFReader(file)

    def write(writer: gguf.GGUFWriter) -> None:
        for name, field in reader.fields.items():
            if not name.startswith("tokenizer.") or name == "tokenizer.ggml.mask_token_id":
                continue
            kinds = field.types
            if kinds[0] == gguf.GGUFValueType.ARRAY:
                writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1])
            else:
                writer.add_key_value(name, field.contents(), kinds[0])

    return write


def _told(tokenizer: PreTrainedTokenizerFast, told: dict[str, Any], rule: str, rows: int) -> Fields:
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in told["model"]["vocab"].items():
        if i < rows:
            tokens[i], kinds[i] = text, NORMAL
    for added in told["added_tokens"]:
        if added["id"] < rows:
            tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in told["model"]["merges"]]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    special["unknown"] = tokenizer.unk_token_id
    begins = cast(list[int], tokenizer("a").input_ids)[0] == tokenizer.bos_token_id and tokenizer.bos_token_id is not None

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        for name, i in special.items():
            if i is not None:
                writer.add_uint32(f"tokenizer.ggml.{name}_token_id", int(i))
        writer.add_add_bos_token(bool(begins))
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)

    return write


def _rule(told: dict[str, Any]) -> str | None:
    """The name of the splitting rule of a byte-level tokenizer."""
    before = told.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return SPLITS.get(steps[0].get("pattern", {}).get("Regex", ""))
    return None
