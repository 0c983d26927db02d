"""A small C kernel, built once per machine by its own compiler: attention of one position over rows of unlike lengths.

SDPA on CPUs reads every row up to the longest one's end, and is slow with a handful of queries. Where no compiler is found, or
the shapes are others, SDPA computes the same (``attention.py``).
"""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.store import store_folder

SOURCE = Path(__file__).with_name("attend.c")
# Sums may be reordered. Not -ffast-math: with some compilers a library built so changes how the whole process rounds tiny numbers.
REORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math")
FLAGS = ("-O3", "-march=native", *REORDER, "-fopenmp", "-shared", "-fPIC")
MOST_QUERIES, MOST_SIZE = 32, 256  # as in the source


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor | None:
    """Attention of one position per row, or None where the kernel does not apply.

    Args:
        query: ``[rows, kv heads, group, size]`` float32.
        keys, values: ``[rows, kv heads, capacity, size]`` float32 on the CPU, views of one layout, tokens next to each other.
        lengths: ``[rows]`` int32, keys that each row sees, at least 1.
    """
    rows, heads, group, size = query.shape
    library = _library() if keys.device.type == "cpu" and keys.dtype == torch.float32 else None
    plain = keys.stride() == values.stride() and keys.stride()[2:] == (size, 1) and values.shape[3] == size
    if library is None or not plain or group > MOST_QUERIES or size > MOST_SIZE:
        return None
    query, lengths = query.contiguous(), lengths.contiguous()
    out = torch.empty_like(query)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (query, keys, values, out, lengths)]
    sizes = [ctypes.c_int64(x) for x in (rows, heads, group, size, keys.stride(0), keys.stride(1))]
    library.attend_rows(*pointers, *sizes, ctypes.c_float(scale))
    return out


@cache
def _library() -> ctypes.CDLL | None:
    """The built kernel; None without a C compiler.

    It shares torch's OpenMP threads: torch has loaded a ``libgomp.so.1`` already, and a library of that name is loaded once.
    """
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or platform.system() != "Linux":
        return None
    described = f"{SOURCE.read_text()}{FLAGS}{compiler}{processor()}"
    built = store_folder() / "kernels" / f"attend-{hashlib.sha256(described.encode()).hexdigest()[:16]}.so"
    try:
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
                made = Path(scratch) / built.name
                subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"], check=True, capture_output=True)
                made.replace(built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """What ``-march=native`` depends on: a store on a shared disk serves unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
