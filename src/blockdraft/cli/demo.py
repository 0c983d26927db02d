"""``blockdraft demo``: one prompt answered twice, side by side: autoregressively, and drafted by DFlash."""

import argparse
from typing import TYPE_CHECKING

from blockdraft.cli import options
from blockdraft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from blockdraft.drafters.base import Drafter
    from blockdraft.generation import Completion
    from blockdraft.targets.target import Target

PROMPT = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs 3 dollars. "
    "How much money does the baker earn in a day?"
)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo", help="see it: the same answer twice, side by side")
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="default: a small sum in words")
    parser.add_argument("--max-new-tokens", type=options.positive, default=128, metavar="N", help="default: %(default)s")
    options.add_prompt(parser)
    options.add_models(parser, dtype_help="default: float32, where identical is identical")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from blockdraft.verification import is_tie

    if not args.prompt.strip():
        raise UsageError("the prompt is empty; give at least one token of text")
    target, drafter = options.load(args, dtype="float32")
    assert drafter is not None
    from blockdraft.prompts import encode

    ids = encode(target, args.prompt, args.system)
    console = Console()
    console.print(f"[bold]{escape(target.name)}[/], {str(target.dtype).removeprefix('torch.')} on {target.device}:")
    console.print(args.prompt + "\n", markup=False, highlight=False)
    screen = Screen(console)
    plain, drafted = (Side(target, chosen, args) for chosen in (None, drafter))
    for side in (plain, drafted):
        side.warm_up(ids)
    with screen.live(plain, drafted) as refresh:
        try:
            for side in (plain, drafted):
                for _ in side.answer(ids):
                    refresh()
        except KeyboardInterrupt:
            return 130  # the columns stand as far as they came
    a, b = plain.result(), drafted.result()
    console.print(verdict(target, ids, a, b), highlight=False)
    return 0 if a.token_ids == b.token_ids or target.dtype.itemsize < 4 or is_tie(target, ids, a.token_ids, b.token_ids) else 1


class Side:
    """One of the two answers, with its tokens coloured by who wrote them."""

    def __init__(self, target: "Target", drafter: "Drafter | None", args: argparse.Namespace):
        from rich.text import Text

        from blockdraft.decoding.text import Detokenizer

        self.target, self.drafter, self.args = target, drafter, args
        self.text = Text()
        assert target.tokenizer is not None
        self._detokenizer = Detokenizer(target.tokenizer)

    def warm_up(self, ids: list[int]) -> None:
        """First calls create kernels: keep that out of the comparison."""
        from blockdraft.generation import generate
        from blockdraft.rules.sampling import SamplingParams

        generate(self.target, ids, self.drafter, SamplingParams(max_new_tokens=12, ignore_eos=True))

    def answer(self, ids: list[int]):  # type: ignore[no-untyped-def]
        from blockdraft.decoding.decode import decode
        from blockdraft.decoding.request import Request
        from blockdraft.rules.sampling import SamplingParams

        params = SamplingParams(max_new_tokens=self.args.max_new_tokens)
        self.request = Request(ids, params, self.target, 0, self.args.max_context)
        for round in decode(self.target, self.drafter, [self.request], 1, self.args.block_size if self.drafter else None):
            for (_, tokens), accepted in zip(round.emitted, round.accepted, strict=True):
                for i, token in enumerate(tokens):
                    self.text.append(self._detokenizer.push(token), style="green" if i < accepted else "")
            yield round
        self.text.append(self._detokenizer.flush())

    def result(self) -> "Completion":
        from blockdraft.generation import completion

        return completion(self.request, self.target, self.drafter)


class Screen:
    """Two columns that grow on a terminal; elsewhere both texts are printed once, at the end."""

    def __init__(self, console: "Console"):
        self.console = console

    def live(self, plain: Side, drafted: Side):  # type: ignore[no-untyped-def]
        from contextlib import contextmanager

        from rich.live import Live

        @contextmanager
        def running():  # type: ignore[no-untyped-def]
            if not self.console.is_terminal:
                yield lambda: None
                self.console.print(self._columns(plain, drafted))
                return
            with Live(self._columns(plain, drafted), console=self.console, auto_refresh=False) as live:
                yield lambda: live.update(self._columns(plain, drafted), refresh=True)

        return running()

    @staticmethod
    def _columns(plain: Side, drafted: Side) -> "RenderableType":
        from rich.panel import Panel
        from rich.table import Table

        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(
            Panel(plain.text, title="autoregressive"),
            Panel(drafted.text, title="DFlash, [green]drafted and accepted[/]"),
        )
        return grid


def verdict(target: "Target", ids: list[int], plain: "Completion", drafted: "Completion") -> str:
    """One line: identical or where they part, both speeds, their ratio, the acceptance length."""
    slow, fast = plain.tokens_per_second, drafted.tokens_per_second
    speeds = f"{slow:.1f} and {fast:.1f} tokens/s, [bold]{fast / slow:.2f}x[/]" if slow and fast else "too short to time"
    tau = f", acceptance length {drafted.acceptance_length:.2f}" if drafted.acceptance_length else ""
    if plain.token_ids == drafted.token_ids:
        return f"[bold green]identical[/] ({plain.new_tokens} tokens): {speeds}{tau}"
    from rich.markup import escape

    from blockdraft.verification import explain_difference

    difference = escape(explain_difference(target, ids, plain.token_ids, drafted.token_ids))
    return f"[bold yellow]not identical[/]: {difference}; {speeds}{tau}"
