"""A drafter network and a target become a working pair: held against each other, then packed."""

import warnings
from collections.abc import Sequence

from blockdraft.drafters.dflash import DFlashDrafter
from blockdraft.drafters.eagle3 import Eagle3, Eagle3Drafter
from blockdraft.drafters.network import DFlash
from blockdraft.drafters.shortlist import Shortlist
from blockdraft.engine.packing import pack_linears
from blockdraft.errors import UsageError
from blockdraft.targets.target import Target

PADDING_ROWS = 1024  # vocabularies of one tokenizer differ at most by rows of padding


def at_work(network: DFlash | Eagle3, name: str, target: Target, words: Shortlist | None = None) -> DFlashDrafter | Eagle3Drafter:
    """A network as a drafter, checked against the target, in its dtype and on its device (where it stays).

    Args:
        words: a DFlash's shortlist.

    Raises:
        UsageError: they do not fit.
    """
    check_eagle3(network, target, name) if isinstance(network, Eagle3) else check_pair(network, target, name)
    network = network.to(device=target.device, dtype=target.dtype).requires_grad_(False)
    packed = pack_linears(network.linears(), target.dtype, target.device)
    if isinstance(network, Eagle3):
        return Eagle3Drafter(network, target.embed, target.vocab_size, name, packed)
    return DFlashDrafter(network, target.embed, target.head, name, packed, words)


def check_eagle3(network: Eagle3, target: Target, name: str) -> None:
    """Refuse an EAGLE-3 drafter that does not fit the target.

    Raises:
        UsageError: names the quantity and both sides.
    """
    config, layers, rows = network.config, len(target.layers), target.embedding.num_embeddings
    width, taps = config.backbone.hidden_size, list(config.taps)
    checks = (
        (target.tappable, "features of one hidden state per token", "layers or an embedding of another shape"),
        (width == target.hidden_size, f"hidden size {width}", f"{target.hidden_size}"),
        (taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < layers, f"tapped layers {taps}", f"layers 0 to {layers - 1}"),
        (
            abs(config.vocabulary - rows) <= PADDING_ROWS and int(network.words().max()) < target.vocab_size,
            f"a vocabulary of {config.vocabulary}, words up to {int(network.words().max())}",
            f"{rows} embedding rows, {target.vocab_size} head rows",
        ),
    )
    _refuse_misfit(checks, name, target)


def _refuse_misfit(checks: Sequence[tuple[bool, str, str]], name: str, target: Target) -> None:
    for fits, drafter_side, target_side in checks:
        if not fits:
            raise UsageError(f"drafter {name} does not fit target {target.name}: it has {drafter_side}, the target {target_side}")


def check_pair(network: DFlash, target: Target, name: str) -> None:
    """Refuse a drafter that does not fit the target.

    Raises:
        UsageError: names the quantity and both sides.
    """
    config, layers = network.config, len(target.layers)
    width, vocabulary = config.backbone.hidden_size, config.backbone.vocab_size
    taps, mask = list(config.taps), config.mask_token_id
    rows = target.embedding.num_embeddings
    real = len(target.tokenizer) if target.tokenizer is not None else min(rows, vocabulary)
    checks = (
        (target.tappable, "features of one hidden state per token", "layers or an embedding of another shape"),
        (width == target.hidden_size, f"hidden size {width}", f"{target.hidden_size}"),
        (config.target_layers == layers, f"a target of {config.target_layers} layers", f"{layers} layers"),
        (taps == sorted(set(taps)) and taps[0] >= 0, f"tapped layers {taps} that do not increase", f"{layers} layers"),
        (taps[-1] < layers - 1, f"tapped layers {taps}", f"layers 0 to {layers - 2} that can be tapped (the last one cannot)"),
        (
            abs(vocabulary - rows) <= PADDING_ROWS and min(vocabulary, rows, target.vocab_size) >= real,
            f"a vocabulary of {vocabulary}",
            f"{rows} embedding rows, {target.vocab_size} head rows, {real} tokens",
        ),
        (0 <= mask < rows, f"mask token id {mask}", f"embedding rows 0 to {rows - 1}"),
    )
    _refuse_misfit(checks, name, target)
    special = set(target.end_tokens)
    if target.tokenizer is not None:
        special |= {target.tokenizer.pad_token_id, target.tokenizer.eos_token_id}
    if mask in special:
        warnings.warn(f"drafter {name} uses the pad or end token {mask} as its mask token: expect low acceptance")
