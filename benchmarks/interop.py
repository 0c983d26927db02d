"""Our drafter in the engines that people run: loaded as it is, the same tokens, the same acceptance.

    python benchmarks/interop.py [--data-dir DIR] [--limit 20] [--tokens 64] [--environments DIR] [--out RESULT.json]
                                 [--engines official,transformers,speculators,vllm,llama]

The drafter is converted to every layout first, which compares what it wrote. Then each engine runs in a process of its own, in a
virtual environment of its own where it needs one, on the same GSM8K prompts, greedy, float32. One line of JSON per check; what
could not run says ``skipped`` and why. Exit status 1 if a check failed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize

import llama_cpp
from blockdraft.files import store_folder
from blockdraft.formats import eagle3, gguf
from blockdraft.formats.convert import convert
from blockdraft.load import load_target
from blockdraft.prompts import encode
from blockdraft.store import obtain
from blockdraft.training.batches import Document
from blockdraft.training.config import TrainConfig
from blockdraft.training.initial import first_eagle3
from peers import HERE, Worker, acceptance, python_for

WITHIN = 0.03  # of our acceptance length
WITHIN_LLAMA = 0.05
# Keys in which speculators' own converter differs from what is written here, and why.
VERSIONS = {
    "speculators_version": "the version that wrote it",
    "transformers_version": "the version that wrote it",
    "speculators_config": "names the target by path",
    "transformer_layer_config": "theirs carries keys of the drafter's file that are no layer's",
}
DIFFERING = {
    "dflash": {"sliding_window_non_causal": "theirs stays false, which vLLM 0.32 takes for all layers being causal", **VERSIONS},
    "eagle3": {
        "architectures": "theirs names a class of before, ours the one that loads the folder",
        "eagle_aux_hidden_state_layer_ids": "theirs is null, which stands for the usual three that ours names",
        **VERSIONS,
    },
}
# And in which llama.cpp's converter does.
GGUF_DIFFERING = {
    "dflash.logit_scale": "1 in theirs, the default",
    "dflash.rope.dimension_count": "the size of a head in ours, the default",
    "tokenizer.ggml.pre": "ours is what tokenizer.json says, theirs what a test text is split into: the same tokens",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=HERE.parents[1] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--environments", type=Path, default=store_folder() / "peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target("smollm2-135m", "float32")
    lines = (args.data_dir / "gsm8k.jsonl").read_text().splitlines()[: args.limit]
    args.prompts = [encode(target, json.loads(line)["turns"][0]) for line in lines]
    shipped = HERE.parent / "src" / "blockdraft" / "shipped" / "smollm2-135m"
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as place:
        # Other engines draft from the whole vocabulary: without the list of frequent words, rounds can be compared.
        args.folders = {"zlab": Path(place) / "zlab-dflash"}
        shutil.copytree(shipped, args.folders["zlab"], ignore=shutil.ignore_patterns("shortlist.json"))
        for layout in ("speculators", "transformers", "gguf"):
            args.folders[layout] = Path(place) / ("drafter.gguf" if layout == "gguf" else f"{layout}-dflash")
            proofs = convert(shipped, args.folders[layout], layout, target)
            found.append(tell("convert", f"zlab to {layout}", True, "; ".join(proofs)))
        del target
        args.ours = answers(args, "ours", "dflash", args.folders["zlab"])
        for engine in args.engines.split(","):
            try:
                found += [tell(engine, *check) for check in ENGINES[engine](args)]
            except (ChildProcessError, subprocess.CalledProcessError, OSError) as error:
                found.append(tell(engine, "all", None, f"{type(error).__name__}: {error}"))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if any(check["passed"] is False for check in found):
        raise SystemExit(1)


def tell(engine: str, check: str, passed: bool | None, detail: str) -> dict:
    """One check, printed; None: skipped."""
    row = {"engine": engine, "check": check, "passed": passed, "detail": detail}
    print(json.dumps({**row, "passed": "skipped" if passed is None else passed}), flush=True)
    return row


def answers(args: argparse.Namespace, peer: str, method: str, drafter: Path, **changes: str) -> list[dict]:
    """A peer's answers to all prompts."""
    options = {"target": str(obtain("smollm2-135m")), "name": "smollm2-135m", "drafter": str(drafter), "dtype": "float32"}
    options |= changes
    worker = Worker(peer, method, python_for(peer, args.environments), options)
    try:
        return [worker.answer(ids, args.tokens) for ids in args.prompts]
    finally:
        worker.kill()


def same_as_ours(args: argparse.Namespace, theirs: list[dict]) -> Iterator[tuple[str, bool, str]]:
    """The same tokens in the same rounds (the last round of an answer may be counted or not)."""
    tokens = sum(a["ids"] == b["ids"] for a, b in zip(args.ours, theirs, strict=True))
    rounds = sum(abs(a["rounds"] - b["rounds"]) <= 1 for a, b in zip(args.ours, theirs, strict=True))
    count = len(args.ours)
    yield "tokens", tokens == count, f"{tokens} of {count} answers equal"
    ours, others = (sum(answer["rounds"] for answer in found) for found in (args.ours, theirs))
    detail = f"{rounds} of {count} answers in as many rounds, give or take the last; {ours} here, {others} there"
    yield "rounds", rounds == count, detail


def official(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    yield from same_as_ours(args, answers(args, "dflash", "official-dflash", args.folders["zlab"]))
    parity = [sys.executable, "-m", "pytest", str(HERE.parent / "tests" / "test_parity.py")]
    done = subprocess.run(parity, check=False, capture_output=True, text=True)
    yield (
        "every schema and DFlash 2, random weights: tokens, rounds, logits",
        done.returncode == 0,
        done.stdout.strip().splitlines()[-1],
    )


def transformers(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    yield from same_as_ours(args, answers(args, "transformers", "hf-folder", args.folders["transformers"]))


def vllm(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    plain = answers(args, "vllm", "vllm", args.folders["zlab"])
    ours = acceptance(args.ours)
    for layout in ("zlab", "speculators"):
        theirs = answers(args, "vllm", "vllm-dflash", args.folders[layout])
        same = sum(a["ids"] == b["ids"] for a, b in zip(plain, theirs, strict=True))
        yield f"{layout}: output", same == len(plain), f"{same} of {len(plain)} answers equal to its own without a drafter"
        found = acceptance(theirs)
        close = found is not None and abs(found / ours - 1) <= WITHIN
        yield f"{layout}: acceptance", close, f"acceptance length {found if found is None else round(found, 3)}, here {ours:.3f}"


def speculators(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    """Its loader reads what we write, and its converters write what ours writes."""
    python = python_for("speculators", args.environments)
    with tempfile.TemporaryDirectory() as place:
        folders = {"dflash": (args.folders["zlab"], args.folders["speculators"]), "eagle3": some_eagle3(Path(place))}
        for kind, (flat, ours) in folders.items():
            theirs = Path(place) / f"{kind}-theirs"
            command = [python, str(HERE / "speculators_worker.py"), kind, *map(str, (flat, ours, theirs, obtain("smollm2-135m")))]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                yield f"{kind}: loads", False, done.stderr.strip().splitlines()[-1]
                continue
            told = json.loads(done.stdout.strip().splitlines()[-1])
            yield f"{kind}: loads", told["loaded"], f"{told['tensors']} tensors as in the file"
            yield f"{kind}: same tensors as its converter's", told["same_tensors"], told["tensors_detail"]
            written, converted = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
            differing = sorted(key for key in written.keys() | converted.keys() if written.get(key) != converted.get(key))
            detail = f"differing: {', '.join(differing)}; listed: {', '.join(sorted(DIFFERING[kind]))}"
            yield f"{kind}: same keys, but for the listed", set(differing) <= set(DIFFERING[kind]), detail


def some_eagle3(place: Path) -> tuple[Path, Path]:
    """An untrained EAGLE-3 drafter over 4,096 words, in SafeAILab's layout and in speculators'."""
    target = load_target("smollm2-135m", "float32")
    some_words = Document("", "", list(range(0, 3 * 4096, 3)), 0)
    network = first_eagle3(TrainConfig(drafter="eagle3", words=4096), target, [some_words])
    folders = place / "eagle3-flat", place / "eagle3-ours"
    folders[0].mkdir()
    eagle3.write(network, folders[0], len(target.layers), torch.float32)
    convert(folders[0], folders[1], "speculators", target)
    return folders


def same_gguf(ours: Path, theirs: Path) -> tuple[bool, str]:
    """Two drafters' files: equal tensors, equal keys but for those listed and what is said for people (``general.*``)."""
    readers = [GGUFReader(file) for file in (ours, theirs)]
    tensors = [{t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors} for reader in readers]
    fields = [{name: f.contents() for name, f in reader.fields.items()} for reader in readers]
    unlike = [name for name in tensors[0] | tensors[1] if not all(name in t for t in tensors)]
    unlike += [name for name in tensors[0] if name in tensors[1] and not np.array_equal(tensors[0][name], tensors[1][name])]
    keys = {key for key in fields[0] | fields[1] if fields[0].get(key) != fields[1].get(key)}
    keys = {key for key in keys if not key.startswith(("general.", "GGUF."))}
    detail = f"{len(tensors[0])} tensors, differing: {', '.join(sorted(unlike)) or 'none'}; keys: {', '.join(sorted(keys))}"
    return not unlike and keys <= set(GGUF_DIFFERING), detail


def llama(args: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    """Our GGUF in its server, and beside what its own converter writes; the target's file is its converter's."""
    server, python = llama_cpp.server(args.environments), python_for("llama", args.environments)
    model, ours = obtain("smollm2-135m"), args.folders["gguf"]
    with tempfile.TemporaryDirectory() as place:
        target, theirs = Path(place) / "target.gguf", Path(place) / "drafter.gguf"
        llama_cpp.to_gguf(args.environments, python, model, target)
        llama_cpp.to_gguf(args.environments, python, args.folders["zlab"], theirs, model)
        yield "same file as its converter's", *same_gguf(ours, theirs)
        asked = {"server": str(server), "target": str(target), "slots": str(gguf.read_header(ours).fields["dflash.block_size"] - 1)}
        plain = answers(args, "llama", "llama", ours, **asked)
        drafted = answers(args, "llama", "llama-dflash", ours, **asked)
    same = sum(a["ids"] == b["ids"] for a, b in zip(plain, drafted, strict=True))
    yield "output", same == len(plain), f"{same} of {len(plain)} answers equal to its own without a drafter"
    found, here = acceptance(drafted), acceptance(args.ours)
    close = found is not None and abs(found / here - 1) <= WITHIN_LLAMA
    yield "acceptance", close, f"acceptance length {found if found is None else round(found, 3)}, here {here:.3f}"


ENGINES: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, bool, str]]]] = {
    "official": official,
    "transformers": transformers,
    "speculators": speculators,
    "vllm": vllm,
    "llama": llama,
}

if __name__ == "__main__":
    sys.exit(main())
