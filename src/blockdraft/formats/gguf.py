"""GGUF, as llama.cpp's ``draft-dflash`` reads it: one file with the drafter's keys and tensors and the target's whole tokenizer.

Two dialects are about. The one that llama.cpp has merged (ggml-org PR #22105) counts tapped layers by their *input*, one more than
an output, and says the mask token among the tokenizer's keys. Earlier ones (architecture ``dflash`` or ``dflash-draft``) hold plain
ids, and other names for two tensors; they are read, and the merged one is written.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config

from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.errors import UsageError
from blockdraft.files import write_whole
from blockdraft.formats import folder as files
from blockdraft.formats.tokenizer import tokenizer_fields
from blockdraft.targets.target import Target

ARCHITECTURES = ("dflash", "dflash-draft")
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
# Of DFlash 2; whole names, since some have no suffix.
LAYER2 = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
TOP2 = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
KNOWN = set(
    "block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv "
    "attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.causal attention.sliding_window "
    "attention.sliding_window_pattern rope.freq_base rope.dimension_count block_size embedding_scale logit_scale "
    "final_logit_softcapping target_layers target_layer_ids mask_token_id target_hidden_size n_target_features vocab_size".split()
) | set(SECOND)
# What would change its drafts, and is not read.
UNREAD = {"rope.scaling.type": "none", "attention.value_scale": 1.0, "sample_from_anchor": False, "has_confidence_head": False}
EARLIER = {
    "dflash_fc": "fc",
    "dflash.fc": "fc",
    "dflash_hidden_norm": "hidden_norm",
    "dflash.hidden_norm": "hidden_norm",
    "hidden_norm": "hidden_norm",
}
PLAIN = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Attributes:
        architecture: as written.
        fields: key to value, the tokenizer's left out but for the mask token.
        tensors: name to type (``F32``, ``Q8_0``, ...) and shape, outermost first.
    """

    architecture: str
    fields: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def merged(self) -> bool:
        """Whether it is in the dialect that llama.cpp reads."""
        return "dflash.target_layers" in self.fields and "enc.output_norm.weight" in self.tensors

    @property
    def quantised(self) -> list[str]:
        """Kinds of its tensors that are not plain floats."""
        return sorted({kind for kind, _ in self.tensors.values()} - {"F32", "F16", "BF16"})


def read_header(file: Path) -> Header:
    """Keys and tensor shapes.

    Raises:
        UsageError: no GGUF file, or a truncated one.
    """
    reader = _open(file)
    wanted = ("tokenizer.ggml.mask_token_id",)
    fields = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("tokenizer.") or name in wanted}
    tensors = {t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors}
    return Header(str(fields.get("general.architecture")), fields, tensors)


def unknown_keys(fields: dict[str, Any]) -> list[str]:
    """Keys of a drafter's file that mean nothing here."""
    arch = str(fields.get("general.architecture"))
    ours = {key: key.removeprefix(f"{arch}.").removeprefix("dflash.") for key in fields if key.startswith((f"{arch}.", "dflash."))}
    return sorted(key for key, bare in ours.items() if bare not in KNOWN)


def is_drafter(header: Header) -> bool:
    """Whether a file holds a DFlash drafter."""
    return header.architecture in ARCHITECTURES


def read(file: Path, target: Target) -> DFlash:
    """A DFlash network in the file's dtype (quantised: float32, with a note), on the CPU.

    Args:
        target: its depth and vocabulary stand nowhere in the file.

    Raises:
        UsageError: no such file, another architecture, a key or tensor missing, unknown or wrong.
    """
    header = read_header(file)
    if not is_drafter(header):
        raise UsageError(f"{file} is a GGUF file of architecture {header.architecture!r}, not of a DFlash drafter")
    with files.building(file):
        network = DFlash(_meaning(header, file, target))
    if header.quantised:
        warnings.warn(f"{file} is quantised ({', '.join(header.quantised)}): its weights are read as float32, with what was lost")
    tensors = {_ours(t.name): _tensor(t) for t in _open(file).tensors}
    files.refuse_another("embedding", tensors.pop("token_embd.weight", None), target.embedding.weight, file, target.name)
    files.refuse_another("head", tensors.pop("output.weight", None), target.head.get_parameter("weight"), file, target.name)
    matrices = {tensor.dtype for tensor in tensors.values() if tensor.dim() > 1}
    one = torch.float32 if header.quantised else next(iter(matrices)) if len(matrices) == 1 else None
    if one is not None:  # norms are float32 in every file
        tensors = {name: tensor.to(one) for name, tensor in tensors.items()}
    files.fill(network, tensors, file)
    return network


def write(network: DFlash, file: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a file, whole or not at all.

    Raises:
        UsageError: a meaning that the format or llama.cpp cannot hold: layers of unlike causality or window size, scaled logits,
            other than plain rotary embeddings, biases; or a tokenizer that cannot be told.
    """
    config = network.config
    c = config.backbone
    if len(set(config.causal)) > 1:
        raise UsageError("llama.cpp has one causality for the whole drafter; the layers of this one differ, which would be lost")
    if config.selector is None and (config.output_multiplier != 1 or config.softcap is not None):
        raise UsageError("llama.cpp scales and caps no logits of a DFlash drafter; this one asks for it, which would be lost")
    windows = {window for window in config.windows if window is not None}
    if len(windows) > 1:
        raise UsageError("GGUF has one window for all sliding layers; this drafter has several")
    rope = dict(c.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise UsageError(f"rotary embeddings of kind {rope['rope_type']} are not written to GGUF here")
    if dtype not in PLAIN:
        raise UsageError(f"weights of {str(dtype).removeprefix('torch.')} are not written to GGUF; float32 and 16 bits are")
    if any(name.endswith(".bias") for name in network.state_dict()):
        raise UsageError("llama.cpp reads no biases of a DFlash drafter; this one has some")
    fields = tokenizer_fields(target)

    def save(path: Path) -> None:
        writer = gguf.GGUFWriter(path, "dflash")
        writer.add_name(f"DFlash drafter for {Path(target.name).name}")
        for key, value in _numbers(config).items():
            if isinstance(value, bool):
                writer.add_bool(f"dflash.{key}", value)
            elif isinstance(value, float):
                writer.add_float32(f"dflash.{key}", value)
            else:
                writer.add_uint32(f"dflash.{key}", value)
        writer.add_array("dflash.target_layers", [tap + 1 for tap in config.taps])
        if windows:
            writer.add_array("dflash.attention.sliding_window_pattern", [window is not None for window in config.windows])
        fields(writer)
        writer.add_uint32("tokenizer.ggml.mask_token_id", config.mask_token_id)
        for name, tensor in network.state_dict().items():
            _add(writer, _theirs(name), tensor.to(dtype if tensor.dim() > 1 else torch.float32).contiguous().cpu())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write_whole(file, save)


def _numbers(config: DFlashConfig) -> dict[str, int | float | bool]:
    """The keys that hold one number."""
    c: Any = config.backbone
    window = next((window for window in config.windows if window is not None), None)
    found: dict[str, int | float | bool] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "attention.causal": bool(config.causal[0]),
        "rope.freq_base": float(dict(c.rope_parameters or {})["rope_theta"]),
        "rope.dimension_count": c.head_dim,
        "block_size": config.block_size,
        "embedding_scale": float(config.embedding_scale),
    }
    if config.convolution is not None and config.selector is not None:
        found |= dict(zip(SECOND, (*config.convolution, *config.selector), strict=True))
        found |= {"logit_scale": float(config.output_multiplier)}
        found |= {} if config.softcap is None else {"final_logit_softcapping": float(config.softcap)}
    return found if window is None else {**found, "attention.sliding_window": window}


def _meaning(header: Header, file: Path, target: Target) -> DFlashConfig:
    fields, arch = header.fields, header.architecture

    def value(*keys: str, default: Any = None) -> Any:
        for key in keys:
            for full in (f"{arch}.{key}", f"{arch}.dflash.{key}", f"dflash.{key}"):
                if full in fields:
                    return fields[full]
        if default is None:
            raise UsageError(f"{file} has no {arch}.{keys[0]}: not a whole DFlash drafter")
        return default

    for key, harmless in UNREAD.items():
        found = value(key, default=harmless)
        if found != harmless:
            raise UsageError(f"{file} says {arch}.{key} = {found!r}, which is not supported here")
    heads, layers = int(value("attention.head_count")), int(value("block_count"))
    width = int(value("embedding_length"))
    size = int(value("attention.key_length", default=width // heads))
    window = int(value("attention.sliding_window", default=0)) or None
    pattern = [bool(slides) for slides in value("attention.sliding_window_pattern", default=[window is not None] * layers)]
    if len(pattern) != layers:
        raise UsageError(f"{file}: the window's pattern names {len(pattern)} layers, block_count is {layers}")
    slots = int(value("block_size", default=16))
    taps = [int(i) for i in value("target_layers", "target_layer_ids")]
    mask = fields.get("tokenizer.ggml.mask_token_id")
    mask = value("mask_token_id") if mask is None else mask
    sizes = [int(value(key)) for key in SECOND] if any(key.endswith(SECOND) for key in fields) else []
    backbone = Qwen3Config(
        vocab_size=target.embedding.num_embeddings,
        hidden_size=width,
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(value("attention.head_count_kv", default=heads)),
        head_dim=size,
        rms_norm_eps=_decimal(value("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=int(value("context_length")),
        rope_parameters={"rope_type": "default", "rope_theta": _decimal(value("rope.freq_base", default=1e6))},
        tie_word_embeddings=False,
    )
    return DFlashConfig(
        backbone=backbone,
        block_size=slots,
        mask_token_id=int(mask),
        taps=tuple(i - 1 for i in taps) if header.merged else tuple(taps),
        target_layers=len(target.layers),
        causal=(bool(value("attention.causal", default=False)),) * layers,
        windows=tuple(window if slides else None for slides in pattern),
        embedding_scale=_decimal(value("embedding_scale", default=1.0)),
        output_multiplier=_decimal(value("logit_scale", default=1.0)),
        softcap=_decimal(value("final_logit_softcapping", default=0.0)) or None,
        convolution=(sizes[0], sizes[1]) if sizes else None,
        selector=(sizes[2], sizes[3]) if sizes else None,
    )


def _decimal(value: float) -> float:
    """The shortest decimal number that a float32 stands for: 1e-6 is stored as 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _open(file: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(file)
    except FileNotFoundError:
        raise UsageError(f"there is no file {file}") from None
    except Exception as error:  # the package's own checks raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{file} is no whole GGUF file: {type(error).__name__}: {reason}") from error


def _tensor(found: "gguf.ReaderTensor") -> Tensor:
    shape = tuple(int(n) for n in reversed(found.shape))
    plain = {kind: dtype for dtype, kind in PLAIN.items()}
    if found.tensor_type in plain:
        data = torch.from_numpy(np.array(found.data)).reshape(-1).view(torch.uint8)
        return data.view(plain[found.tensor_type]).view(shape)
    return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type)).view(shape).float()


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=PLAIN[tensor.dtype])
    else:
        writer.add_tensor(name, tensor.numpy())


def _theirs(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    if name in TOP2:
        return TOP2[name]
    _, number, part = name.split(".", 2)
    if part in LAYER2:
        return f"blk.{number}.{LAYER2[part]}"
    return f"blk.{number}.{LAYER[part.removesuffix('.weight')]}.weight"


def _ours(name: str) -> str:
    stem = name.removesuffix(".weight")
    top = {theirs: ours for ours, theirs in TOP.items()} | EARLIER
    if stem in top:
        return f"{top[stem]}.weight"
    whole = {theirs: ours for ours, theirs in TOP2.items()}
    if name in whole:
        return whole[name]
    layer = {theirs: ours for ours, theirs in LAYER.items()} | {"post_attention_norm": "post_attention_layernorm"}
    second = {theirs.removesuffix(".weight"): ours for ours, theirs in LAYER2.items()}
    blk, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if blk == "blk" and number.isdecimal() and part in layer:
        return f"layers.{number}.{layer[part]}.weight"
    if blk == "blk" and number.isdecimal() and part in second:
        return f"layers.{number}.{second[part]}"
    return name  # an unknown one, which is refused by its name
