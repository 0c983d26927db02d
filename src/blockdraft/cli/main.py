"""Parse, run, and turn every failure into one sentence and an exit status: 2 usage, 1 failure, 130 interrupted."""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

from blockdraft import __version__
from blockdraft.cli import bench, chat, convert, data, demo, doctor, generate, inspect, plot, train, verify
from blockdraft.errors import BlockdraftError

COMMANDS = (generate, chat, demo, verify, bench, data, train, plot, inspect, convert, doctor)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"blockdraft: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="blockdraft", description="A language model's own answer, several times faster.")
    top.add_argument("--version", action="version", version=f"blockdraft {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.showwarning = _warn
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the character shows a mark, not an error
    args = parser().parse_args(arguments)
    try:
        _quiet_libraries()
        status: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BlockdraftError as error:
        print(f"blockdraft: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output went away: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"blockdraft: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except Exception as error:
        if os.environ.get("BLOCKDRAFT_TRACEBACK"):
            raise
        print(
            f"blockdraft: {type(error).__name__}: {error} (a defect of blockdraft; BLOCKDRAFT_TRACEBACK=1 shows where)",
            file=sys.stderr,
        )
        return 1


def _quiet_libraries() -> None:
    """Only blockdraft speaks: no progress bars or notices of the libraries below, no telemetry of the hub's."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from logging import ERROR, getLogger

    from transformers.utils import logging

    logging.set_verbosity_error()
    getLogger("huggingface_hub").setLevel(ERROR)
    logging.disable_progress_bar()


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if Path(filename).is_relative_to(Path(__file__).parents[1]):  # what libraries warn each other of is not the user's business
        print(f"blockdraft: note: {message}", file=sys.stderr)
