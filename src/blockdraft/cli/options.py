"""Options that several commands share, and what they stand for."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.drafters.base import Drafter
    from blockdraft.rules.sampling import SamplingParams
    from blockdraft.targets.target import Target


BEST_DTYPE = "default: bfloat16 where the hardware has it"


def add_target(parser: argparse.ArgumentParser, dtype_help: str) -> "argparse._ArgumentGroup":
    group = parser.add_argument_group("models")
    group.add_argument("--target", default="smollm2-135m", help="model folder, .gguf file, Hugging Face id, or %(default)s")
    group.add_argument("--dtype", help=f"float32, bfloat16 or float16; {dtype_help}")
    group.add_argument("--device", help="cpu, cuda, cuda:N or mps; default: the best there is")
    group.add_argument("--threads", type=positive, help="CPU threads; default: all cores")
    group.add_argument(
        "--compile",
        choices=("auto", "on", "off"),
        default="auto",
        help="passes as one call (C kernels on a CPU, recorded graphs on CUDA): where that can be (default), or refuse, or never",
    )
    return group


def add_exact(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--exact", action="store_true", help="verify to the bit what plain steps say, in every dtype (CPU; Llama-like)"
    )


def add_models(parser: argparse.ArgumentParser, dtype_help: str = BEST_DTYPE) -> None:
    group = add_target(parser, dtype_help)
    add_exact(group)
    group.add_argument(
        "--drafter", help="drafter folder: DFlash, EAGLE-3, or a smaller language model; default: the one shipped for the target"
    )
    group.add_argument(
        "--tree", type=tree, metavar="{auto,off,N}", help="candidates of a round: as many as pay (default), a chain, or N"
    )
    group.add_argument(
        "--denoising-steps", type=positive, metavar="S", help="passes over a block, for a drafter trained for several; default: 1"
    )
    group.add_argument("--block-size", type=int, help="slots of a block, the anchor included; default: as trained")


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most probable tokens; 0: all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the most probable tokens of mass P; 1: all")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the most probable")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off")
    group.add_argument("--seed", type=int, help="of the noise at temperature > 0; default: a new one, shown by --json")
    group.add_argument("--acceptance", default="match", choices=("match", "rejection"), help="rule at temperature > 0")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end token")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--system", help="system message")
    group.add_argument("--max-context", type=positive, metavar="N", help="limit on prompt and answer; default: the model's")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def sampling(args: argparse.Namespace) -> "SamplingParams":
    from blockdraft.rules.sampling import SamplingParams

    if args.seed is not None and args.temperature == 0:
        print("blockdraft: note: --seed has no effect at temperature 0, which is greedy", file=sys.stderr)
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        acceptance=args.acceptance,
    )


def load_target(args: argparse.Namespace, dtype: str | None = None) -> "Target":
    """The target of ``add_target``'s options."""
    import torch

    import blockdraft.load
    from blockdraft.engine.kernels import library, use_kernels, why_none
    from blockdraft.errors import UsageError

    if args.threads and args.threads > 4 * (os.cpu_count() or 1):
        raise UsageError(f"--threads {args.threads} is far above this machine's {os.cpu_count()} cores; use at most that many")
    if args.threads:
        torch.set_num_threads(args.threads)
    use_kernels(args.compile != "off")
    target = blockdraft.load.load_target(args.target, args.dtype or dtype, args.device, getattr(args, "exact", False))
    target.recorder.required = args.compile == "on"
    if args.compile == "on" and target.kernels not in ("layers", "graphs"):
        if target.device.type == "cuda":
            reason = "its layers have windows or chunks, whose masks differ by layer"
        elif target.device.type != "cpu":
            reason = f"it is on {target.device.type}; they are made for CPUs and CUDA"
        elif library() is None:
            reason = why_none()
        else:
            reason = "its layers are not like Llama's, or oneDNN multiplies them faster"
        raise UsageError(f"--compile on: passes of {args.target} do not run as one call here: {reason}. Leave --compile out")
    return target


def load(args: argparse.Namespace, dtype: str | None = None) -> "tuple[Target, Drafter | None]":
    """Target and, unless the method is ``ar``, drafter."""
    from blockdraft.drafters.dflash import DFlashDrafter
    from blockdraft.drafters.lookup import LookupDrafter
    from blockdraft.errors import UsageError
    from blockdraft.generation import checked_block_size, with_tree
    from blockdraft.load import load_drafter

    method = getattr(args, "method", "dflash")
    acceptance = getattr(args, "acceptance", "match")
    given = {"--drafter": args.drafter, "--tree": args.tree, "--denoising-steps": args.denoising_steps}
    if method == "ar":
        given |= {"--block-size": args.block_size, "--acceptance": acceptance if acceptance != "match" else None}
    for name, value in given.items():
        if method != "dflash" and value is not None:
            raise UsageError(f"{name} has no effect with --method {method}; leave one of them out")
    target = load_target(args, dtype)
    if method == "ar":
        return target, None
    drafter = LookupDrafter() if method == "lookup" else load_drafter(args.drafter, target)
    if args.denoising_steps is not None:
        if not isinstance(drafter, DFlashDrafter):
            raise UsageError(f"--denoising-steps is for DFlash drafters, not for {args.drafter}; leave it out")
        drafter = drafter.with_denoising(args.denoising_steps)
    checked_block_size(args.block_size, drafter)
    return target, with_tree(target, drafter, "auto" if args.tree is None else args.tree, args.block_size, acceptance)


def summary(result: Any) -> str:
    """One line about a completion."""
    parts = [f"{result.new_tokens} tokens"]
    if result.tokens_per_second:
        parts.append(f"{result.tokens_per_second:.1f} tokens/s")
    parts.append(f"first token after {result.time_to_first_token_s:.2f} s")
    if result.acceptance_length is not None:
        plain = f" ({result.plain_rounds} plain)" if result.plain_rounds else ""
        parts.append(f"{result.rounds} rounds{plain}, acceptance length {result.acceptance_length:.2f}")
    parts.append(f"{result.method}, {result.dtype} on {result.device}, ended by {result.finish_reason}")
    return "; ".join(parts)


def tree(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def path(text: str) -> Path:
    return Path(text).expanduser()
