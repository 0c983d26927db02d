"""Files appear whole; locks, digests, and the folder that keeps what is fetched or built once per machine."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open

from blockdraft.errors import BlockdraftError, UsageError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]


def store_folder() -> Path:
    """``$BLOCKDRAFT_CACHE``, else ``blockdraft`` in the user's cache directory."""
    own = os.environ.get("BLOCKDRAFT_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockdraft"


def weights_digest(folder: Path) -> str | None:
    """sha256 over the names, dtypes, shapes and bytes of all tensors in a folder's safetensors, whatever their order.

    Returns:
        The digest in hex, or None if the folder holds no safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    tensors: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            tensors.update(dict.fromkeys(handle.keys(), file))
    total = hashlib.sha256()
    handles = {file: safe_open(file, "pt") for file in files}
    for name in sorted(tensors):
        tensor = handles[tensors[name]].get_tensor(name).contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, make it durable, and rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        fsync(beside)
        os.replace(beside, path)
    except SafetensorError as error:  # a full disk, in safetensors' words
        raise BlockdraftError(f"cannot write {path}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def lock(path: Path, taken: str | None = None) -> IO[str]:
    """Hold a file for this process until the result is closed or the process ends, however it ends.

    Args:
        taken: what to say if another process holds it; None: wait for it.

    Raises:
        UsageError: another process holds it.
    """
    file = path.open("w")
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken is not None else 0))
    except OSError:
        file.close()
        raise UsageError(taken) from None
    return file


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
