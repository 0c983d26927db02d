"""From a name or a path to a Target or a drafter, with every misfit named."""

import json
import warnings
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3Drafter
from blockdraft.drafters.model import ModelDrafter, refuse_other_tokenizer
from blockdraft.drafters.pairing import at_work
from blockdraft.drafters.shortlist import Shortlist, read_shortlist
from blockdraft.engine.packing import cpu_multiplies_bfloat16
from blockdraft.errors import UsageError
from blockdraft.files import sha256_of, weights_digest
from blockdraft.formats import assistant, eagle3, gguf, speculators, torchspec, zlab
from blockdraft.formats.folder import read_config
from blockdraft.store import SHORT_NAMES, obtain, stored_identity
from blockdraft.targets.checkpoint import explained, load_gguf, load_pretrained
from blockdraft.targets.target import Target

DEFAULT_TARGET = "smollm2-135m"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LoadedDrafter = DFlashDrafter | Eagle3Drafter | ModelDrafter


# ---- devices and dtypes


def resolve_device(name: str | None = None) -> torch.device:
    """A device by name; None: CUDA, then Apple's MPS, then the CPU.

    Raises:
        UsageError: unknown, or not on this machine.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(kind for kind, there in available.items() if there))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is unknown; use cpu, cuda, cuda:N or mps") from None
    missing = not available.get(device.type, False)
    if missing or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"device {name!r} is not available here; use {', '.join(k for k, there in available.items() if there)}")
    return device


def resolve_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """A dtype by name; None: bfloat16 where the hardware multiplies it, float32 elsewhere.

    Raises:
        UsageError: unknown, or without arithmetic on the device.
    """
    if name is None:
        return torch.bfloat16 if device.type != "cpu" or cpu_multiplies_bfloat16() else torch.float32
    dtype = name if isinstance(name, torch.dtype) else DTYPES.get(name)
    if dtype not in DTYPES.values():
        raise UsageError(f"dtype {name!r} is unknown; use {', '.join(DTYPES)}")
    if dtype == torch.float16 and device.type == "cpu":
        raise UsageError("dtype 'float16' is not available on a CPU; use bfloat16 or float32")
    assert dtype is not None
    return dtype


# ---- targets


def load_target(
    name: str | Path = DEFAULT_TARGET, dtype: str | torch.dtype | None = None, device: str | None = None, exact: bool = False
) -> Target:
    """Load a causal language model as a target; arguments and errors as for ``load_model``.

    Args:
        exact: use kernels whose rows do not depend on each other, so that verification gives plain steps' logits to the bit, in
            every dtype; UsageError where there are none. In float32 on CPUs that is so anyway for Llama-like models.
    """
    model, tokenizer, digest = load_model(name, dtype, device)
    return Target(model, tokenizer, name=str(name), digest=digest, exact=exact)


def load_model(
    name: str | Path, dtype: str | torch.dtype | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str | None]:
    """A plain transformers model, its tokenizer, and the digest of its weights, if known.

    Args:
        name: a local model folder, a ``.gguf`` file, a Hugging Face id, or the short name ``smollm2-135m``.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; None: bfloat16 where the hardware has it.
        device: "cpu", "cuda", "cuda:N", "mps"; None: the best there is.

    Raises:
        UsageError: an unknown name, dtype or device, or a model that cannot be supported; says why.
        BlockdraftError: it should exist but could not be fetched or read.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    text = str(name)
    if not text.strip():
        raise UsageError("the target's name is empty; give a model folder, a .gguf file or a Hugging Face id")
    source: str | Path = obtain(text) if text in SHORT_NAMES else name
    digest = None
    if text in SHORT_NAMES:
        digest = stored_identity(Path(source))["weights_sha256"]
    if Path(source).is_file() or text.endswith(".gguf"):
        if not Path(source).is_file():
            raise UsageError(f"there is no file {text}; give a .gguf file, a model folder or a Hugging Face id")
        model, tokenizer = explained(text, partial(load_gguf, Path(source), kind))
    else:
        model, tokenizer = explained(text, partial(load_pretrained, source, kind))
    return model.to(place), tokenizer, digest  # type: ignore[arg-type]


# ---- drafters


def load_drafter(path: str | Path | None, target: Target, shortlist: bool = True) -> LoadedDrafter:
    """Load a drafter for a target, on its device and in its dtype.

    Args:
        path: a folder or .gguf file: a DFlash or EAGLE-3 drafter in any layout that ``formats`` reads, or a smaller language model
            of the same tokenizer; None: the shipped DFlash drafter, for its own target only.
        target: whose embedding and head it borrows.
        shortlist: draft from the words of the folder's shortlist, if it has one; False: from the whole vocabulary.

    Raises:
        UsageError: not a drafter, damaged, made for another target, or none shipped for this one; names both sides.
    """
    if path is not None and not str(path).strip():
        raise UsageError("the drafter's name is empty; give a drafter folder")
    folder = shipped_drafter(target) if path is None else Path(path).expanduser()
    name = f"{target.name}-dflash" if path is None else str(path)
    if folder.is_file() and folder.suffix == ".gguf":
        drafter = gguf.is_drafter(gguf.read_header(folder))
        return at_work(gguf.read(folder, target), name, target) if drafter else _smaller_model(folder, name, target)
    if not folder.is_dir():
        raise UsageError(f"there is no drafter folder {folder}")
    raw = read_config(folder)
    _refuse_another_target(folder, target)
    if speculators.is_speculators(raw):
        found = speculators.read(folder, target)
        return at_work(found.network, name, target, _own_words(found, target) or _shortlist(folder, target, shortlist))
    if eagle3.is_eagle3(raw):
        return at_work(eagle3.read(folder, len(target.layers), getattr(target.embedding, "weight", None)), name, target)
    if assistant.is_assistant(raw):
        return at_work(assistant.read(folder, target), name, target)
    if torchspec.is_torchspec(raw):
        return at_work(torchspec.read(folder, target), name, target)
    if "dflash_config" not in raw and any(str(kind).endswith("ForCausalLM") for kind in raw.get("architectures") or []):
        return _smaller_model(folder, name, target)
    return at_work(zlab.read(folder), name, target, _shortlist(folder, target, shortlist))


def _refuse_another_target(folder: Path, target: Target) -> None:
    """Hold ``target.json``, which a training run leaves, against the target."""
    try:
        who = json.loads((folder / "target.json").read_text())
        shape = tuple(who.get(key) for key in ("layers", "hidden_size"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError):
        warnings.warn(f"{folder / 'target.json'} is damaged: which target the drafter learnt from is unknown")
        return
    ours = (len(target.layers), target.hidden_size)
    if any(there is not None and there != here for there, here in zip(shape, ours, strict=True)):
        raise UsageError(
            f"{folder} was made for {who.get('name')}, {shape[0]} layers of width {shape[1]}; "
            f"{target.name} has {ours[0]} of {ours[1]}"
        )
    digest = who.get("weights_sha256")
    if None not in (digest, target.digest) and digest != target.digest:
        warnings.warn(f"{folder} learnt from other weights than {target.name}'s (target.json): it may be accepted less")


def _smaller_model(place: Path, name: str, target: Target) -> ModelDrafter:
    model = load_target(place, target.dtype, str(target.device))
    refuse_other_tokenizer(model, target)
    return ModelDrafter(model, target.vocab_size, name)


def _shortlist(folder: Path, target: Target, wanted: bool) -> Shortlist | None:
    """The folder's shortlist, if it has one and it is wanted."""
    ids = read_shortlist(folder, target.vocab_size) if wanted else None
    if ids is None:
        return None
    if not isinstance(target.head, nn.Linear):
        warnings.warn(f"the head of {target.name} has no rows to pick from: drafting from its whole vocabulary, slower")
        return None
    return Shortlist.of(ids, target.head)


def _own_words(found: speculators.Read, target: Target) -> Shortlist | None:
    """A reduced vocabulary with rows of its own."""
    if found.words is None or found.head is None:
        return None
    return Shortlist(found.words.to(target.device), found.head.to(target.device, target.dtype), None, target.vocab_size)


def shipped_drafter(target: Target) -> Path:
    """The folder of the drafter that ships for this target, recognised by the digest of the target's weights.

    Raises:
        UsageError: there is none.
    """
    root = Path(str(resources.files("blockdraft"))) / "shipped"
    for folder in sorted(p for p in root.iterdir() if (p / "target.json").exists()):
        wanted = json.loads((folder / "target.json").read_text())
        if wanted["hidden_size"] != target.hidden_size or wanted["layers"] != len(target.layers):
            continue
        if digest_of(target) == wanted["weights_sha256"]:
            return folder
    raise UsageError(
        f"no drafter ships for target {target.name}; give one with --drafter FOLDER (generate and chat run without: --method ar)"
    )


def digest_of(target: Target) -> str | None:
    """Digest of the weights a target was loaded from, computed at the first call; None for a Hugging Face id."""
    if target.digest is None:
        place = Path(target.name)
        if place.is_dir():
            target.digest = weights_digest(place)
        elif place.is_file():
            target.digest = sha256_of(place)
    return target.digest
