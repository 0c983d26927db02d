"""Conversion of a drafter from one layout to another, which proves itself: what was written is read again and compared."""

import copy
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.drafters.eagle3 import Eagle3, Eagle3Drafter
from blockdraft.drafters.network import DFlash, DFlashConfig
from blockdraft.drafters.pairing import at_work, check_eagle3, check_pair
from blockdraft.drafters.shortlist import read_shortlist, write_shortlist
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.files import fsync
from blockdraft.formats import assistant, eagle3, gguf, speculators, torchspec, zlab
from blockdraft.formats.dialect import Dialect, recognise
from blockdraft.targets.target import Target

SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act "
    "max_position_embeddings vocab_size"
).split()
OURS = ("README.md", "config.json", "model.safetensors", "shortlist.json", "target.json")
PROBE = "A drafter writes a block of tokens at once; the model that it serves keeps what it would have written itself."


def convert(
    source: Path, destination: Path, layout: str, target: Target, ignore: Sequence[str] = (), force: bool = False
) -> list[str]:
    """Write a drafter in another layout.

    Args:
        source: a drafter folder or GGUF file.
        destination: a folder, or for ``gguf`` a file; whole or untouched.
        layout: zlab, speculators, gguf, transformers, safeailab.
        target: the drafter's; layouts name its depth, vocabulary or tokenizer.
        ignore: keys of the source's config that may be lost.
        force: replace ``destination``.

    Returns:
        What was compared, one sentence each.

    Raises:
        UsageError: a source that cannot be read or become that, unknown keys, a destination that is there.
        BlockdraftError: what was written is not what was read.
    """
    dialect = check(source, destination, layout, target.name, ignore, force)
    network = read(source, dialect, target)
    fits = check_eagle3 if isinstance(network, Eagle3) else check_pair
    fits(network, target, str(source))  # type: ignore[arg-type]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as room:
            beside = Path(room) / destination.name
            _write(network, beside, layout, target)
            again = read(beside, recognise(beside), target)
            proofs = compare(network, again, target)
            proofs += _carry_over(source, beside, layout, target.vocab_size)
            _replace(beside, destination)
    except OSError as error:
        raise BlockdraftError(f"cannot write {destination}: {error.strerror or error}") from error
    return proofs


def check(source: Path, destination: Path, layout: str, target: str, ignore: Sequence[str] = (), force: bool = False) -> Dialect:
    """What a conversion would be of, from the source's config alone: nothing large is loaded.

    Args:
        target: its name or place, which is not to be written over.

    Raises:
        UsageError: as ``convert``.
    """
    dialect = recognise(source)
    reason = dialect.into()[layout]
    if reason:
        raise UsageError(f"{source} cannot be converted to {layout}: {reason}")
    unknown = unknown_keys(dialect)
    useless = [key for key in ignore if key not in unknown]
    if useless:
        raise UsageError(f"--ignore {useless[0]} has no effect: {source} has no unknown key of that name")
    unknown = [key for key in unknown if key not in ignore]
    if unknown:
        raise UsageError(
            f"{source} has keys that are not known here: {', '.join(unknown)}; what they mean could be lost "
            f"(--ignore {unknown[0]} converts without)"
        )
    check_place(destination, layout, force, (source, Path(target).expanduser()))
    return dialect


def unknown_keys(dialect: Dialect) -> list[str]:
    """Keys of a drafter's config that mean nothing here."""
    known = {
        "zlab": zlab.unknown_keys,
        "speculators": speculators.unknown_keys,
        "gguf": gguf.unknown_keys,
        "transformers": assistant.unknown_keys,
        "torchspec": torchspec.unknown_keys,
        "safeailab": eagle3.unknown_keys,
    }
    return known[dialect.layout](dialect.raw)


def check_place(destination: Path, layout: str, force: bool, kept: Sequence[Path]) -> None:
    """Refuse to write where something of the user's would be lost."""
    if layout == "gguf" and destination.suffix != ".gguf":
        raise UsageError(f"{destination} has no suffix .gguf, by which readers know such a file; add it")
    if destination.is_symlink():
        raise UsageError(f"{destination} is a link; name the place that it leads to")
    where = destination.resolve()
    blocked = next((folder for folder in where.parents if folder.exists() and not folder.is_dir()), None)
    if blocked is not None:
        raise UsageError(f"{destination} cannot be made: {blocked} is a file")
    for place in (path.resolve() for path in kept if path.exists()):
        if where == place or where in place.parents or place in where.parents:
            raise UsageError(f"{destination} would overwrite {place}, or lie in it; name another place")
    if not destination.exists():
        return
    if destination.is_dir() == (layout == "gguf"):
        kind = "a folder" if destination.is_dir() else "a file"
        raise UsageError(f"{destination} is {kind} already, and --to {layout} writes another kind of thing; name another place")
    if not force:
        raise UsageError(f"{destination} exists; use --force to replace it")
    others = sorted(path.name for path in destination.iterdir() if path.name not in OURS) if destination.is_dir() else []
    if others:
        raise UsageError(f"{destination} holds more than a drafter ({others[0]}); name another place, or move that away")


def read(path: Path, dialect: Dialect, target: Target) -> DFlash | Eagle3:
    """The network of a drafter in any layout that is read here.

    Raises:
        UsageError: it cannot be read; or it has words of its own, which a network alone does not hold.
    """
    if dialect.refused:
        raise UsageError(f"{path}: {dialect.refused}")
    if dialect.layout == "speculators":
        found = speculators.read(path, target)
        if found.words is not None:
            raise UsageError(f"{path} has a reduced vocabulary with a head of its own, which a network alone does not hold")
        return found.network
    if dialect.layout == "safeailab":
        return eagle3.read(path, len(target.layers))
    if dialect.layout == "gguf":
        return gguf.read(path, target)
    if dialect.layout == "transformers":
        return assistant.read(path, target)
    return torchspec.read(path, target) if dialect.layout == "torchspec" else zlab.read(path)


def write_mended(source: Path, network: DFlash, config: DFlashConfig, destination: Path) -> None:
    """Write a network under another config, in z-lab's layout, with what lay beside it; whole or not at all.

    Raises:
        UsageError: a meaning that the layout cannot hold.
    """
    mended = DFlash(config)
    destination.parent.mkdir(parents=True, exist_ok=True)
    mended.to(network.fc.weight.dtype).load_state_dict(network.state_dict())
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as room:
        beside = Path(room) / destination.name
        beside.mkdir()
        zlab.write(mended, beside, network.fc.weight.dtype)
        _carry_over(source, beside, "zlab", config.backbone.vocab_size)
        _replace(beside, destination)


def compare(network: DFlash | Eagle3, again: DFlash | Eagle3, target: Target) -> list[str]:
    """What was read again against what was to be written: tensors to the bit, settings one by one, and drafts on a probe text.

    Raises:
        BlockdraftError: names the first thing that differs.
    """
    ours, theirs = network.state_dict(), again.state_dict()
    for name, tensor in ours.items():
        if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name]):
            raise BlockdraftError(f"what was written is not what was read: tensor {name} differs; nothing was kept")
    wanted, found = _settings(network), _settings(again)
    for key, value in wanted.items():
        if not _same(found[key], value):
            raise BlockdraftError(f"what was written is not what was read: {key} is {found[key]}, not {value}; nothing was kept")
    ids = _probe(target)
    if not torch.equal(_drafted(network, target, ids), _drafted(again, target, ids)):
        raise BlockdraftError("what was written does not draft as what was read; nothing was kept")
    drafts = "draft logits" if isinstance(network, DFlash) else "drafts"
    return [
        f"{len(ours)} tensors equal to the bit",
        f"{len(wanted)} settings equal",
        f"{drafts} equal on a text of {len(ids)} tokens",
    ]


def _settings(network: DFlash | Eagle3) -> dict[str, object]:
    """All that a network is besides its weights."""
    found = {key: value for key, value in vars(network.config).items() if key != "backbone"}
    backbone = network.config.backbone
    return {**found, **{key: getattr(backbone, key) for key in SIZES}, "rope": dict(backbone.rope_parameters or {})}


def _same(found: object, value: object) -> bool:
    """Equal; numbers as far as float32 holds them, which GGUF stores."""
    if isinstance(found, float) and isinstance(value, float):
        return math.isclose(found, value, rel_tol=1e-6)
    if isinstance(found, dict) and isinstance(value, dict):
        return found.keys() == value.keys() and all(_same(found[key], value[key]) for key in value)
    return found == value


def _probe(target: Target) -> list[int]:
    if target.tokenizer is not None:
        return list(target.tokenizer(PROBE).input_ids)
    return [i % target.embedding.num_embeddings for i in range(3, 40)]


def _drafted(network: DFlash | Eagle3, target: Target, ids: list[int]) -> Tensor:
    """One block behind a text: its draft logits, or an EAGLE-3's tokens."""
    drafter = at_work(copy.deepcopy(network), "probe", target)
    drafter.reset(1, len(ids) + drafter.block_size)
    cache = target.new_cache(1, len(ids))
    with torch.inference_mode():
        pieces = [found for _, found in target.prefill(cache, 0, ids[:-1], drafter.taps) if found is not None]
        features = torch.cat(pieces, dim=1)
        drafter.observe(0, torch.tensor([ids[:-1]], device=target.device), features, [len(ids) - 1])
        anchors = torch.tensor(ids[-1:], device=target.device)
        if isinstance(drafter, Eagle3Drafter):
            return drafter.propose(anchors, [drafter.block_size], None).tokens
        return drafter.logits(anchors, [drafter.block_size])


def _write(network: DFlash | Eagle3, place: Path, layout: str, target: Target) -> None:
    dtype = network.fc.weight.dtype
    if layout == "gguf":
        assert isinstance(network, DFlash)
        gguf.write(network, place, target, dtype)
        return
    place.mkdir(parents=True)
    if layout == "speculators":
        speculators.write(network, place, target, dtype)
    elif isinstance(network, Eagle3):
        eagle3.write(network, place, len(target.layers), dtype)
    elif layout == "transformers":
        assistant.write(network, place, target, dtype)
    else:
        zlab.write(network, place, dtype)


def _carry_over(source: Path, place: Path, layout: str, vocabulary: int) -> list[str]:
    """The files beside a drafter that are ours: which target it serves, and its shortlist."""
    ids = read_shortlist(source, vocabulary) if source.is_dir() else None
    if place.is_file():
        return [] if ids is None else [f"its shortlist of {len(ids)} words has no place in a .gguf file"]
    found = []
    if source.is_dir() and (source / "target.json").exists():
        shutil.copyfile(source / "target.json", place / "target.json")
    if ids is not None and layout in ("zlab", "speculators"):
        write_shortlist(ids.tolist(), place)
        found.append(f"the shortlist of {len(ids)} words goes with it")
    elif ids is not None:
        found.append(f"its shortlist of {len(ids)} words stays behind: readers of that layout draft from the whole vocabulary")
    for path in (*place.iterdir(), place):
        fsync(path)
    return found


def _replace(beside: Path, destination: Path) -> None:
    """Put a finished folder or file in its place; what was there comes back if that fails."""
    if not destination.exists():
        beside.rename(destination)
        return
    old = beside.parent / "old"
    destination.rename(old)
    try:
        beside.rename(destination)
    except OSError:
        old.rename(destination)
        raise
