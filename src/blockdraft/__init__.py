"""blockdraft: a language model's own answer, several times faster. Lossless speculative decoding with DFlash drafters.

>>> from blockdraft import load_target, load_drafter, generate, SamplingParams
>>> target = load_target("smollm2-135m")
>>> drafter = load_drafter(None, target)
>>> generate(target, "What is a prime number?", drafter, SamplingParams(max_new_tokens=64))[0].text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blockdraft.errors import BlockdraftError, UsageError
    from blockdraft.formats.transformers import AssistantDrafter
    from blockdraft.generation import Completion, generate, stream
    from blockdraft.load import load_drafter, load_target
    from blockdraft.rules.sampling import SamplingParams
    from blockdraft.targets.target import Target

_HOMES = {
    "AssistantDrafter": "formats.transformers",
    "BlockdraftError": "errors",
    "UsageError": "errors",
    "Completion": "generation",
    "generate": "generation",
    "stream": "generation",
    "load_drafter": "load",
    "load_target": "load",
    "SamplingParams": "rules.sampling",
    "Target": "targets.target",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import on first use: ``blockdraft --help`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'blockdraft' has no attribute {name!r}")
    return getattr(import_module(f"blockdraft.{_HOMES[name]}"), name)
