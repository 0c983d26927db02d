"""A model folder, GGUF file or Hugging Face id as a transformers model and tokenizer, or one sentence that says why not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.targets.support import refuse_unsupported

T = TypeVar("T")


def load_pretrained(source: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if Path(source).is_dir() and not (Path(source) / "config.json").exists():
        raise UsageError(f"{source} is not a model folder: it has no config.json")
    if not Path(source).exists() and (str(source).count("/") > 1 or str(source).startswith((".", "/", "~"))):
        raise UsageError(f"there is no folder {source}; give a model folder, a .gguf file or a Hugging Face id")
    config = AutoConfig.from_pretrained(source)
    if "DFlashDraftModel" in (getattr(config, "architectures", None) or []):
        raise UsageError(f"{source} is a drafter, not a target; give it with --drafter")
    if config.is_encoder_decoder:
        raise UsageError(f"{source} is an encoder-decoder model; blockdraft decodes decoder-only models")
    model = _whole(source, AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True))
    refuse_unsupported(model)
    return model, AutoTokenizer.from_pretrained(source)


def load_gguf(file: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file, dequantized."""
    where: dict[str, Any] = {"gguf_file": file.name}
    dequantize = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, quantization_config=dequantize, dtype=dtype, output_loading_info=True, **where
    )
    model = _whole(file, loaded)
    return model, AutoTokenizer.from_pretrained(file.parent, **where)


def _whole(source: str | Path, loaded: Any) -> PreTrainedModel:
    """The model of ``(model, loading info)``, if no parameter had to be made up."""
    model, info = loaded
    made_up = sorted(map(str, [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]))
    if made_up:
        more = f" and {len(made_up) - 3} more" if len(made_up) > 3 else ""
        raise BlockdraftError(f"{source} lacks weights of {type(model).__name__}: {', '.join(made_up[:3])}{more}")
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def explained(name: str, load: Callable[[], T]) -> T:
    """Turn whatever transformers raises into one sentence."""
    try:
        with _without_bars():
            return load()
    except BlockdraftError:
        raise
    except SafetensorError as error:
        raise BlockdraftError(f"the weights of {name} are damaged: {error}; fetch them again") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BlockdraftError(f"cannot load target {name}: {reason[:300]}") from error
