"""Where a causal language model keeps its parts: found by watching one forward pass, never by their names."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.errors import UsageError


@dataclass(frozen=True)
class Anatomy:
    """The parts of a target that others borrow.

    Attributes:
        embedding: ``weight [rows, hidden]``; any scale is applied by the model, outside this weight.
        layers: the decoder layers in order.
        final_norm: what stands between the last layer and the head, or None if nothing does.
        head: maps ``[..., hidden]`` to ``[..., rows]``, before any soft cap or multiplier of the model.
        tappable: whether embedding, layers and head all work on ``[rows, tokens, hidden]``.
        linears: the linear layers in groups that read the same tensor, each layer called exactly once per pass.
        norms: of each layer, what has a vector of weights and nothing else, in order.
        rotary: gives the cosines and sines that all layers turn queries and keys by, or None.
    """

    embedding: nn.Embedding
    layers: list[nn.Module]
    final_norm: nn.Module | None
    head: nn.Module
    tappable: bool
    linears: list[list[nn.Linear]]
    norms: list[list[nn.Module]]
    rotary: nn.Module | None


@dataclass(eq=False)
class _Call:
    module: nn.Module
    inputs: tuple[Any, ...]
    output: Any


@contextmanager
def _watched() -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append(_Call(module, inputs, output))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


def first_tensor(output: Any) -> Tensor:
    """The hidden states in what a decoder layer returned: the tensor itself or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def dissect(model: PreTrainedModel, ids: Tensor) -> tuple[Anatomy, Tensor]:
    """Run ``ids`` ``[1, n]`` through the model once and find its parts.

    Returns:
        The anatomy, and the logits ``[1, n, rows]`` of this plain pass (the model's own attention, no cache).

    Raises:
        UsageError: a part cannot be found; names the part.
    """
    config = model.config.get_text_config()
    with torch.inference_mode(), _watched() as calls:
        logits = model(input_ids=ids, use_cache=False).logits

    embedding = next(
        (
            c.module
            for c in calls
            if isinstance(c.module, nn.Embedding)
            and c.module.num_embeddings >= config.vocab_size
            and c.inputs
            and isinstance(c.inputs[0], Tensor)
            and torch.equal(c.inputs[0].reshape(-1), ids.reshape(-1))
        ),
        None,
    )
    layers = _decoder_layers(model, config.num_hidden_layers, [c.module for c in calls])
    head_call = next(
        (
            c
            for c in reversed(calls)
            if isinstance(c.output, Tensor)
            and c.output.shape[-1] == logits.shape[-1]
            and getattr(c.module, "weight", None) is not None
            and c.inputs
            and isinstance(c.inputs[0], Tensor)
        ),
        None,
    )
    for part, found in (("token embedding", embedding), ("decoder layers", layers), ("output head", head_call)):
        if not found:
            raise UsageError(f"{type(model).__name__}: no {part} found in a forward pass; this model is not supported")
    assert isinstance(embedding, nn.Embedding) and layers and head_call is not None
    outputs = [first_tensor(call.output) for call in calls if any(call.module is layer for layer in layers)]
    shape = (1, ids.shape[1], config.hidden_size)
    tappable = embedding.embedding_dim == config.hidden_size and all(x.shape == shape for x in [*outputs, head_call.inputs[0]])
    norm = _final_norm(calls, head_call, layers[-1])
    linears, norms = _linears(calls), [_norms(layer, calls) for layer in layers]
    return Anatomy(embedding, layers, norm, head_call.module, tappable, linears, norms, _rotary(calls, ids.shape[1])), logits


def _decoder_layers(model: nn.Module, count: int, called: list[nn.Module]) -> list[nn.Module] | None:
    """The outermost ModuleList whose ``count`` members were all called."""
    ran = {id(m) for m in called}
    lists = [(name.count("."), m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    fitting = [(depth, list(m)) for depth, m in lists if len(m) == count and all(id(layer) in ran for layer in m)]
    return min(fitting, key=lambda found: found[0])[1] if fitting else None


def _linears(calls: list[_Call]) -> list[list[nn.Linear]]:
    """Linear layers in calling order; neighbours that read the very same tensor, with or without bias alike, in one group."""
    times = Counter(id(call.module) for call in calls)
    groups: list[list[_Call]] = []
    for call in calls:
        if type(call.module) is not nn.Linear or times[id(call.module)] > 1:
            continue
        before = groups[-1][-1] if groups else None
        same = before is not None and before.inputs[0] is call.inputs[0]
        if same and isinstance(before, _Call) and (before.module.bias is None) == (call.module.bias is None):
            groups[-1].append(call)
        else:
            groups.append([call])
    return [[call.module for call in group] for group in groups]  # type: ignore[misc]


def _norms(layer: nn.Module, calls: list[_Call]) -> list[nn.Module]:
    """What a layer called that has a vector of weights and nothing else, in order."""
    inside = {id(module) for module in layer.modules()}
    return [c.module for c in calls if id(c.module) in inside and [p.dim() for p in c.module.parameters()] == [1]]


def _rotary(calls: list[_Call], count: int) -> nn.Module | None:
    """The module that gave cosines and sines ``[1, count, size]`` to all layers; None if there is not exactly one."""
    found = [c.module for c in calls if isinstance(c.output, tuple) and [_angles(x, count) for x in c.output] == [True, True]]
    return found[0] if len(found) == 1 else None


def _angles(x: Any, count: int) -> bool:
    return isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == (1, count)


def _final_norm(calls: list[_Call], head: _Call, last_layer: nn.Module) -> nn.Module | None:
    """The module whose output is what the head read, unless that is the last layer itself."""
    fed = head.inputs[0]
    for call in reversed(calls[: calls.index(head)]):
        output = call.output if isinstance(call.output, Tensor) else None
        same = output is not None and output.untyped_storage().data_ptr() == fed.untyped_storage().data_ptr()
        if same and call.module is not last_layer:
            return call.module
        if call.module is last_layer:
            return None
    return None
