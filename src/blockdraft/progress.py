"""One progress line for long work: on a terminal only, on stderr, with rate and time left."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """A bar that counts to ``total``; silent when stderr is not a terminal.

    Args:
        what: the label.
        total: the count at the end.
        unit: "bytes" shows megabytes and their rate, anything else counts.
        on: False is silent anyway.
    """

    def __init__(self, what: str, total: int, unit: str = "steps", on: bool = True):
        counted = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
        times = [TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
        columns = [TextColumn("{task.description}"), BarColumn(), *counted, *times]
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True, disable=not (on and sys.stderr.isatty()))
        self._task = self._bars.add_task(what, total=total, note="")

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def update(self, completed: int) -> None:
        self._bars.update(self._task, completed=completed)

    def note(self, text: str) -> None:
        """What stands behind the times."""
        self._bars.update(self._task, note=text)


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
