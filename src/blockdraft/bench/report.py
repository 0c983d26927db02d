"""The report: a table for the terminal, and one HTML file that holds its pictures."""

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.errors import UsageError
from blockdraft.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

COLUMNS = ("task", "method", "speed-up", "tokens/s", "first token", "tau", "first slot", "identical", "extra MB")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}img{max-width:100%}.quiet{color:#666}"
)


def cells(result: dict[str, Any]) -> list[str]:
    """A result as the strings of a table row."""
    speed, low = result["speedup"], result["speedup_low"]
    interval = f"{speed:.2f}x" + (f" ({low:.2f}-{result['speedup_high']:.2f})" if low else "") if speed else "-"
    first = result["time_to_first_token_s"]
    return [
        result["task"],
        result["method"],
        interval,
        _number(result["tokens_per_second"], 1),
        "-" if first is None else f"{first:.2f} s",
        _number(result["acceptance_length"], 2),
        _number(result["first_slot_acceptance"], 2),
        "-" if result["identical_to_ar"] is None else f"{result['identical_to_ar']:.0%}",
        "-" if result["extra_bytes"] is None else f"{result['extra_bytes'] / 1e6:.0f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def means(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plain mean over tasks of each method's speed-up, acceptance and share of identical answers; rates have none."""
    if len(_names(results, "task")) < 2:
        return []
    rows = []
    for method in _names(results, "method"):
        own = [r for r in results if r["method"] == method]
        row: dict[str, Any] = dict.fromkeys(own[0]) | {"task": "mean", "method": method}
        for key in ("speedup", "acceptance_length", "first_slot_acceptance", "identical_to_ar"):
            values = [r[key] for r in own]
            row[key] = sum(values) / len(values) if None not in values else None
        rows.append(row)
    return rows


def table(results: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for i, name in enumerate(COLUMNS):
        shown.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    before = None
    for result in [*results, *means(results)]:
        if before is not None and result["task"] != before:
            shown.add_section()
        before = result["task"]
        shown.add_row(*cells(result))
    return shown


def refuse_without_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("--html needs matplotlib; install it with `pip install blockdraft[plot]`") from None


def write_html(document: dict[str, Any], path: Path) -> None:
    """Write the report.

    Raises:
        UsageError: matplotlib is not installed.
    """
    refuse_without_matplotlib()
    results, environment = document["results"], document["environment"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(r)) + "</tr>" for r in [*results, *means(results)])
    drawn = [
        ("Speed-up over plain decoding, median over prompts with a 95 % interval", _speedups(results)),
        ("Share of rounds whose candidate at this depth stood", _depths(results)),
        ("Accepted tokens of a round", _lengths(results)),
        ("Time of a round", _splits(results)),
    ]
    pictures = "".join(f'<h2>{title}</h2><img alt="{title}" src="{_embedded(f)}">' for title, f in drawn if f is not None)
    facts = ", ".join(f"{key}: {value}" for key, value in environment.items())
    settings = ", ".join(f"{key} {value}" for key, value in document["settings"].items())
    text = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>blockdraft bench</title><style>{STYLE}</style>"
        f"<h1>blockdraft bench</h1><p>{html.escape(settings)}<p class=quiet>{html.escape(facts)}"
        f"<table><tr>{head}</tr>{rows}</table>{pictures}</html>"
    )
    write_whole(path, lambda place: place.write_text(text))


def _embedded(figure: "Figure") -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _canvas(width: float = 11, height: float = 4) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _names(results: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in results))


def _speedups(results: list[dict[str, Any]]) -> "Figure | None":
    shown = [r for r in results if r["speedup"] is not None and r["method"] != "ar"]
    if not shown:
        return None
    figure, axes = _canvas()
    tasks, methods = _names(shown, "task"), _names(shown, "method")
    for place, method in enumerate(methods):
        own = [r for r in shown if r["method"] == method]
        x = [tasks.index(r["task"]) + (place - (len(methods) - 1) / 2) * 0.8 / len(methods) for r in own]
        below, above = ([abs(r["speedup"] - (r[key] or r["speedup"])) for r in own] for key in ("speedup_low", "speedup_high"))
        axes.bar(x, [r["speedup"] for r in own], 0.72 / len(methods), yerr=[below, above], capsize=2, label=method)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.legend()
    return figure


def _depths(results: list[dict[str, Any]]) -> "Figure | None":
    """Mean over tasks."""
    shown = [r for r in results if r["acceptance_by_position"]]
    if not shown:
        return None
    figure, axes = _canvas()
    for method in _names(shown, "method"):
        curves = [r["acceptance_by_position"] for r in shown if r["method"] == method]
        deepest = max(map(len, curves))
        mean = [sum(c[i] if i < len(c) else 0.0 for c in curves) / len(curves) for i in range(deepest)]
        axes.plot(range(1, deepest + 1), mean, "o-", markersize=4, label=method)
    axes.set(xlabel="depth behind the anchor", ylim=(0, 1))
    axes.legend()
    return figure


def _lengths(results: list[dict[str, Any]]) -> "Figure | None":
    """All tasks together."""
    shown = [r for r in results if sum(r["accepted_lengths"] or [])]
    if not shown:
        return None
    figure, axes = _canvas()
    methods = _names(shown, "method")
    for place, method in enumerate(methods):
        counts = [r["accepted_lengths"] for r in shown if r["method"] == method]
        longest = max(map(len, counts))
        total = [sum(c[i] if i < len(c) else 0 for c in counts) for i in range(longest)]
        x = [i + (place - (len(methods) - 1) / 2) * 0.8 / len(methods) for i in range(longest)]
        axes.bar(x, [count / sum(total) for count in total], 0.72 / len(methods), label=method)
    axes.set(xlabel="accepted tokens", ylabel="share of rounds")
    axes.legend()
    return figure


def _splits(results: list[dict[str, Any]]) -> "Figure | None":
    """Milliseconds, mean over tasks."""
    shown = [r for r in results if r["time_split"]]
    if not shown:
        return None
    figure, axes = _canvas(height=0.6 * len(_names(shown, "method")) + 1.4)
    methods = _names(shown, "method")
    left = [0.0] * len(methods)
    for part in ("draft", "verify", "other"):
        own = [[r["time_split"][part] for r in shown if r["method"] == method] for method in methods]
        width = [1000 * sum(values) / len(values) for values in own]
        axes.barh(methods, width, left=left, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(xlabel="milliseconds")
    axes.legend()
    return figure
