"""Small C kernels for CPUs, built once per machine by its own compiler.

``attend.c``: attention of a few positions over rows of unlike lengths. SDPA reads every row up to the longest one's end, and is
slow with a handful of queries. ``layers.c``: linear layers over a handful of rows in float32 (``linear.c``), and whole layers of a
Llama-like model (``plain.py``). ``tree.c``: draft trees. ``loss.c``: the loss of a training step and its gradient. Where there are
none, or the shapes are others, torch computes the same, slower.
"""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.files import store_folder
from blockdraft.progress import Progress

# No -ffast-math: sums keep the order that is written, and some compilers' libraries built so change how a whole process rounds.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
MOST_SIZE = 256  # as in attend.c
_on = True


class Linear(ctypes.Structure):
    """As in ``linear.c``."""

    _fields_ = [("weights", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("narrow", ctypes.c_int64)]


class LinearRows:
    """Weights of a linear layer in the layout of ``linear.c``, and the product with them.

    Args:
        weight: ``[outputs, inputs]`` float32 or bfloat16 on the CPU. The product is one of float32 either way.
        bias: ``[outputs]``, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        built = library()
        assert built is not None
        self._run, panel = built.linear_rows, int(built.panel())
        self.outputs, self.inputs = weight.shape
        padded = -(-self.outputs // panel) * panel
        rows = torch.zeros(padded, self.inputs, dtype=weight.dtype, device="cpu")
        rows[: self.outputs] = weight
        self.weight = rows.view(-1, panel, self.inputs).transpose(1, 2).contiguous()
        self.bias = torch.zeros(padded, dtype=torch.float32, device="cpu")
        if bias is not None:
            self.bias[: self.outputs] = bias
        self.linear = Linear(self.weight.data_ptr(), self.bias.data_ptr(), weight.dtype == torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., outputs]`` float32 of ``[..., inputs]``: each row to the bit what it is alone."""
        if x.shape[-1] != self.inputs:
            raise RuntimeError(f"a layer of {self.inputs} inputs was given {x.shape[-1]}")
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=torch.float32, device="cpu")
        source, target = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        sizes = (x.numel() // self.inputs, self.inputs, self.outputs, self.outputs)
        self._run(source, ctypes.byref(self.linear), target, *map(ctypes.c_int64, sizes))
        return out


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor | None:
    """Attention of a few queries per row, or None where the kernel does not apply.

    Args:
        query: ``[rows, kv heads, group * count, size]`` float32: for each head of the group its ``count`` positions.
        keys, values: ``[rows, kv heads, capacity, size]`` float32 on the CPU, views of one layout, tokens next to each other.
        lengths: ``[rows]`` int32, keys that each row sees, at least 1.
        mask: ``[rows or 1, 1, count, capacity]`` float32, added to the scores.
    """
    rows, heads, group, size = query.shape
    built = library() if keys.device.type == "cpu" and keys.dtype == torch.float32 else None
    plain = keys.stride() == values.stride() and keys.stride()[2:] == (size, 1) and values.shape[3] == size
    if built is None or not plain or size > MOST_SIZE or (mask is not None and mask.dtype != torch.float32):
        return None
    query, lengths = query.contiguous(), lengths.contiguous()
    positions = longest = mask_stride = 1
    if mask is not None:
        mask = mask.contiguous()
        positions, longest = mask.shape[2:]
        mask_stride = positions * longest if mask.shape[0] > 1 else 0
    out = torch.empty_like(query)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (query, keys, values, out, lengths)]
    pointers.append(ctypes.c_void_p(mask.data_ptr() if mask is not None else None))
    sizes = (rows, heads, group, size, keys.stride(0), keys.stride(1), positions, longest, mask_stride)
    built.attend_rows(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_float(scale))
    return out


def grow_tree(logs: Tensor, words: Tensor, copies: Tensor, copy_logs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """``drafters.tree.grow``, always ``nodes`` columns; None where the kernel does not apply."""
    built = library() if logs.device.type == "cpu" and logs.dtype == torch.float32 else None
    if built is None:
        return None
    rows, slots, k = logs.shape
    tokens, parents = (torch.empty(rows, nodes, dtype=torch.int64, device="cpu") for _ in range(2))
    scores = torch.empty(rows, nodes, dtype=torch.float32, device="cpu")
    given = [x.contiguous() for x in (logs, words, copies, copy_logs.float())]
    sizes = (rows, slots, k, copies.shape[1], nodes)
    made = built.grow_tree(*map(_address, given), *map(ctypes.c_int64, sizes), *map(_address, (tokens, parents, scores)))
    return (tokens, parents, scores) if made else None


def see_ancestors(parents: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of a tree's ``[rows, candidates]`` parents: ``[rows, nodes, nodes]`` bool, whether a node sees another, and the candidates'
    depths ``[rows, candidates]``; None where the kernel does not apply."""
    built = library() if parents.device.type == "cpu" else None
    if built is None:
        return None
    rows, candidates = parents.shape
    seen = torch.empty(rows, candidates + 1, candidates + 1, dtype=torch.bool, device="cpu")
    depths, given = torch.empty(rows, candidates, dtype=torch.int64, device="cpu"), parents.contiguous()
    built.see_ancestors(_address(given), ctypes.c_int64(rows), ctypes.c_int64(candidates), _address(seen), _address(depths))
    return seen, depths


class Slots:
    """The slots of a cache's buffers ``[rows, heads, capacity, size]``, float32 on the CPU, which stay where they are."""

    def __init__(self, built: ctypes.CDLL, buffers: Sequence[Tensor]):
        self._run, self.count, self._capacity = built.keep_path, len(buffers), buffers[0].shape[2]
        kind = ctypes.c_int64 * len(buffers)
        self._buffers = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        self._heads, self._sizes = (kind(*(buffer.shape[dim] for buffer in buffers)) for dim in (1, 3))

    @classmethod
    def of(cls, buffers: Sequence[Tensor]) -> "Slots | None":
        """None where the kernel does not apply."""
        built = library() if buffers[0].device.type == "cpu" else None
        return cls(built, buffers) if built is not None else None

    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move the slots ``start + path[i]`` of a row to ``start + i``; the path rises."""
        nodes = (ctypes.c_int64 * len(path))(*path)
        sizes = map(ctypes.c_int64, (self.count, self._capacity, row, start))
        self._run(self._buffers, self._heads, self._sizes, *sizes, nodes, ctypes.c_int64(len(path)))


class LossRows:
    """Cross entropy, KL and their gradient for rows of logits ``[rows, words]``, float32, contiguous, on the CPU.

    The offset is added to the logits in place; ``gradients`` overwrites the draft's.

    Args:
        built: ``library()``.
        logits, teacher: the draft's and the target's; teacher None: cross entropy alone.
        offset: ``[words]`` float32 added to both, or None.
        labels: ``[rows]`` int64, places among the words.

    Attributes:
        entropy, divergence: ``[rows]`` float32; KL is 0 without a teacher.
        right: ``[rows]`` bool, whether the label was the best word before the offset.

    Raises:
        IndexError: a label that is none of the words.
        RuntimeError: tensors of another kind.
    """

    def __init__(self, built: ctypes.CDLL, logits: Tensor, teacher: Tensor | None, offset: Tensor | None, labels: Tensor):
        self._built, self._logits, self._teacher, self._labels = built, logits, teacher, labels.contiguous()
        rows, words = logits.shape
        for tensor in (x for x in (logits, teacher, offset) if x is not None):
            if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.shape[-1] != words:
                raise RuntimeError(f"{tensor.dtype} of {tuple(tensor.shape)} is not contiguous float32 over {words} words")
        if labels.dtype != torch.int64 or (rows and not 0 <= int(labels.min()) <= int(labels.max()) < words):
            raise IndexError(f"a label is not the place of one of {words} words")
        costs = torch.empty(4, rows, dtype=torch.float32, device="cpu")
        self.entropy, self.divergence, self._norm, self._teacher_norm = costs
        self.right = torch.empty(rows, dtype=torch.bool, device="cpu")
        self._sizes = [ctypes.c_int64(size) for size in logits.shape]
        given = (logits, teacher, offset, self._labels)
        built.loss_costs(*map(_address, given), *self._sizes, *map(_address, (*costs, self.right)))

    def gradients(self, hard: Tensor, soft: Tensor) -> Tensor:
        """``hard * d entropy + soft * d divergence`` by the logits, in their memory; the weights are ``[rows]`` float32."""
        given = (self._logits, self._teacher, self._labels)
        weights = (self._norm, self._teacher_norm, hard.contiguous(), soft.contiguous())
        self._built.loss_gradients(*map(_address, given), *self._sizes, *map(_address, weights))
        return self._logits


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def use_kernels(on: bool) -> None:
    """Whether this process runs in these kernels, from the next target or drafter that it loads; at first it does."""
    global _on
    _on = on


def kernels_wanted() -> bool:
    """What ``use_kernels`` was told last."""
    return _on


def library() -> ctypes.CDLL | None:
    """The built kernels; None where they are switched off or could not be built, which is said once."""
    built = _built() if _on else None
    return built if isinstance(built, ctypes.CDLL) else None


def why_none() -> str:
    """Why there are no kernels, where ``library`` has none."""
    return str(_built()) if _on else "they are switched off"


@cache
def _built() -> ctypes.CDLL | str:
    """The kernels, or why there are none.

    They share torch's OpenMP threads: torch has loaded a ``libgomp.so.1`` already, and a library of that name is loaded once.
    """
    found = _build()
    if isinstance(found, str):
        warnings.warn(f"blockdraft's kernels for CPUs cannot be built ({found}): torch computes the same, several times slower")
        return found
    found.panel.restype = found.floats_of_work.restype = found.grow_tree.restype = ctypes.c_int64
    return found


def _build() -> ctypes.CDLL | str:
    compiler = next((found for name in ("gcc", "cc") if (found := shutil.which(name))), None)
    if platform.system() != "Linux":
        return f"not on {platform.system()} yet"
    if compiler is None:
        return "there is no C compiler; install gcc"
    source = Path(__file__).with_name("layers.c")
    built = store_folder() / "kernels" / f"layers-{kernel_digest()}-{Path(compiler).name}.so"
    try:
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as scratch, Progress("building kernels, once", 1):
                made = Path(scratch) / built.name
                subprocess.run([compiler, *FLAGS, str(source), "-o", str(made), "-lm"], check=True, capture_output=True)
                made.replace(built)
        return ctypes.CDLL(str(built))
    except subprocess.CalledProcessError as cause:
        return f"{compiler}: {cause.stderr.decode(errors='replace').strip().split(chr(10))[0]}"
    except OSError as cause:
        return str(cause)


def kernel_digest() -> str:
    """Of the kernels' sources, flags and processor."""
    text = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.c")))
    return hashlib.sha256(f"{text}{FLAGS}{processor()}".encode()).hexdigest()[:16]


def processor() -> str:
    """What ``-march=native`` depends on: a store on a shared disk serves unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
