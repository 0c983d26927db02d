"""A drafter folder: ``config.json`` and ``model.safetensors``, read with the faults said that people meet."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockdraft.errors import UsageError
from blockdraft.files import write_whole


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of ``config.json``.

    Raises:
        UsageError: missing, no JSON object, or one whose parts are of a wrong kind.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a drafter folder: it has no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    for key, kind, told in (("architectures", list, "a list"), ("dflash_config", dict, "an object")):
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise UsageError(f"{path}: {key} is {str(raw[key])[:60]!r}, not {told}")
    return raw


def read_tensors(folder: Path, pickled: bool = False) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``.

    Args:
        pickled: where there is none, read ``pytorch_model.bin``: tensors alone, nothing in it is executed.

    Raises:
        UsageError: missing or damaged.
    """
    path = folder / "model.safetensors"
    if pickled and not path.exists() and (folder / "pytorch_model.bin").exists():
        return _pickled(folder / "pytorch_model.bin")
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no model.safetensors: the drafter's weights are missing") from None
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is damaged or no safetensors file: {error}") from error


def _pickled(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling fails in many ways
        raise UsageError(f"{path} is damaged, or holds more than tensors: {' '.join(str(error).split())[:120]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise UsageError(f"{path} does not hold named tensors")
    return tensors


def fill(network: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Load exactly the tensors that a network has into it, and take their dtype.

    Raises:
        UsageError: a tensor missing, unknown, of another shape or dtype, or not finite.
    """
    expected = network.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        lists = [f"{what}: {', '.join(names[:4])}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise UsageError(f"{folder} does not hold the tensors that its config promises ({'; '.join(lists)})")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UsageError(f"{folder}: {name} has shape {list(tensor.shape)}, the config asks for {list(expected[name].shape)}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise UsageError(f"{folder}: {name} is stored as {tensor.dtype}; ids are whole numbers, and weights are not")
    weights = [tensors[name] for name in expected if expected[name].is_floating_point()]
    dtypes = {tensor.dtype for tensor in weights}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        told = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(f"{folder}: tensors of {told}; a drafter has one dtype, float32, bfloat16 or float16")
    if not all(bool(tensor.isfinite().all()) for tensor in weights):
        raise UsageError(f"{folder} holds weights that are not finite: the drafter is damaged")
    network.to(next(iter(dtypes)))
    network.load_state_dict(tensors)


def whole_number(key: str, value: Any) -> int:
    """A whole number of a config; 1.7, "9" and true are none.

    Raises:
        ValueError: names the key.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def whole_numbers(key: str, values: Iterable[Any]) -> tuple[int, ...]:
    """A list of whole numbers.

    Raises:
        ValueError: names the key.
    """
    return tuple(whole_number(key, value) for value in values)


def flag(key: str, value: Any) -> bool:
    """True or false of a config; "no" and 0 are neither.

    Raises:
        ValueError: names the key.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, neither true nor false")
    return value


@contextmanager
def building(place: Path) -> Iterator[None]:
    """Around what is built from a config: sizes, activations and rope kinds that no layer can have become one UsageError."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # torch and transformers raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{place} cannot be read: {type(error).__name__}: {reason}") from error


def renamed(name: str, prefixes: dict[str, str]) -> str:
    """A tensor's name with its prefix replaced, if that is one of these."""
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


def refuse_another(what: str, found: Tensor | None, ours: Tensor, folder: Path, name: str) -> None:
    """Raise UsageError if a folder brings an embedding or head that is not that of the target ``name``; padded rows may differ."""
    if found is None:
        return
    rows = min(len(found), len(ours)) if found.dim() == 2 else 0
    same = (
        rows > 0
        and found.shape[1:] == ours.shape[1:]
        and torch.equal(found[:rows].to(ours.device, torch.bfloat16), ours[:rows].bfloat16())
    )
    if not same:
        raise UsageError(f"{folder} brings its own {what}, and it is not that of {name}: only borrowed ones are supported")


def write(raw: dict[str, Any], network: nn.Module, folder: Path, dtype: torch.dtype, named: Callable[[str], str] = str) -> None:
    """Write config and weights into an existing folder; buffers of ids keep their dtype, ``named`` turns names into the file's."""
    tensors = {
        named(key): tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for key, tensor in network.state_dict().items()
    }
    write_whole(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_whole(folder / "config.json", lambda path: path.write_text(json.dumps(raw, indent=1) + "\n"))
