"""Tiny random targets of many families, and a tiny model folder with a tokenizer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from blockdraft.targets.target import Target

VOCABULARY = 67  # odd, and smaller than every position table
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # wide enough that the top logits of a random model are far apart
}
WINDOW = {"sliding_window": 7}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}

# family -> (config class, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, **WINDOW, **LAYERS}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {**WINDOW}),
    "mistral": ("MistralConfig", {"head_dim": 8, **WINDOW}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "gpt2": ("GPT2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {**WINDOW}),
    "smollm3": ("SmolLM3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW, **LAYERS}),
}


def model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random causal LM of a family; its logits are far from ties."""
    name, differing = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**COMMON, **differing, **changes})
    own = "eager" if getattr(config, "attn_logit_softcapping", None) else None  # some versions' default drops the cap
    return AutoModelForCausalLM.from_config(config, attn_implementation=own).to(dtype).eval()


def target(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    return Target(model(family, seed, dtype, **changes), name=f"tiny-{family}")


def greedy(reference: PreTrainedModel, prompt: list[int], count: int, eos: int | None = None, **options: Any) -> list[int]:
    """``transformers.generate`` on a model of its own: plain weights, own attention, own cache."""
    ids = torch.tensor([prompt])
    reference.generation_config.eos_token_id = eos
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **options
    )
    return output[0, len(prompt) :].tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_folder(folder: Path, seed: int = 0) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template, as a plain model folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|pad|>", "<|bos|>", "<|end|>", "<|mask|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>")
    fast.chat_template = CHAT
    torch.manual_seed(seed)
    config = LlamaConfig(**{**COMMON, "vocab_size": len(fast), "max_position_embeddings": 512})
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_gguf(path: Path) -> Path:
    """A tiny unquantised Llama as a GGUF file."""
    import gguf
    import numpy as np

    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "ba"]
    hidden, heads, layers, inner = 32, 4, 2, 48
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(i) for i in range(len(pieces))])
    writer.add_token_types([2, 3, 3, *[1] * (len(pieces) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.2, shape).astype(np.float32))

    tensor("token_embd.weight", len(pieces), hidden)
    tensor("output.weight", len(pieces), hidden)
    tensor("output_norm.weight", hidden)
    for i in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{i}.{name}.weight", hidden)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{name}.weight", hidden, hidden)
        tensor(f"blk.{i}.ffn_gate.weight", inner, hidden)
        tensor(f"blk.{i}.ffn_up.weight", inner, hidden)
        tensor(f"blk.{i}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
