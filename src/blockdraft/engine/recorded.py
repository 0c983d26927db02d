"""Recorded passes: on CUDA a pass of one shape is captured once, as a graph, and from then on replayed.

A pass over a few tokens is a thousand short kernels, and Python launches them more slowly than a GPU runs them. A graph is
launched as one. It reads and writes fixed addresses, so everything that differs between two passes of a shape is copied into
tensors of its own: tokens, positions, slots, mask. Shapes are padded to a handful (``KVCache.open_padded``), and a graph belongs
to the cache whose buffers it was captured over. PyTorch: ``torch.cuda.CUDAGraph``.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.engine.kernels import kernels_wanted
from blockdraft.errors import UsageError

Run = Callable[..., tuple[Tensor, ...]]


class Recording:
    """One pass over fixed tensors.

    Args:
        inputs: of the first pass; later ones have their shapes.
        run: the pass: inputs -> outputs. What it writes elsewhere must be at the same addresses in every pass.
    """

    def __init__(self, inputs: Sequence[Tensor], run: Run):
        self._inputs = [tensor.clone() for tensor in inputs]
        self._replay = capture(lambda: run(*self._inputs))

    def play(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The pass over other inputs. The outputs are copies: the next replay writes over its own."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        return tuple(output.clone() for output in self._replay())


class Buffers(Protocol):
    """What passes are recorded over: a KVCache."""

    recordings: dict[Hashable, Recording]


class Recorder:
    """Records the passes of one model, as long as that works.

    Args:
        name: of the model, for the warning.
        device: where it is.

    Attributes:
        required: a pass that cannot be recorded is an error.
        on: whether passes are recorded here.
    """

    def __init__(self, name: str, device: torch.device):
        self.name, self.required = name, False
        self.on = device.type == "cuda" and kernels_wanted()

    def play(self, kv: Buffers, key: Hashable, inputs: Sequence[Tensor], run: Run) -> tuple[Tensor, ...] | None:
        """A pass over ``kv``, recorded if ``key`` is new; None where it cannot be recorded, which is said once.

        Raises:
            UsageError: it cannot be recorded, and must be.
        """
        with torch.inference_mode(), torch.cuda.device_of(inputs[0]):
            if key not in kv.recordings:
                try:
                    kv.recordings[key] = Recording(inputs, run)
                except RuntimeError as cause:  # a synchronisation, an operation that cannot be captured, no memory
                    self.give_up(str(cause).split("\n")[0])
                    return None
            return kv.recordings[key].play(inputs)

    def give_up(self, why: str) -> None:
        """Run every pass kernel by kernel from now on, and say so.

        Raises:
            UsageError: recording is required.
        """
        self.on = False
        if self.required:
            raise UsageError(f"--compile on: passes of {self.name} cannot be recorded: {why}. Leave --compile out")
        warnings.warn(f"passes of {self.name} cannot be recorded, its kernels are launched one by one, slower ({why})")


def capture(run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """Capture what ``run`` launches; the result launches it again and returns the same output tensors, filled anew."""
    side, stream = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):  # libraries set themselves up in the first passes, which a graph cannot hold
        for _ in range(2):
            run()
    stream.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # One pool: graphs are replayed one after the other, and may share what they need in between.
        with torch.cuda.graph(graph, pool=_pool(torch.cuda.current_device()), capture_error_mode="thread_local"):
            outputs = run()
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a capture that fails may leave its own
        raise

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return replay


@cache
def _pool(device: int) -> Any:
    return torch.cuda.graph_pool_handle()
