"""The house: imports run downwards only, no file is longer than a person reads in one go, and the document shows the same rooms.

``ROOMS`` is the one place where their order is written. A room sees what stands below it; within a room files form no circle.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "blockdraft"
MOST_LINES = 400
# From the top floor down. A name is a folder or a file of src/blockdraft.
ROOMS = (
    "__main__",
    "cli",
    "bench",
    "doctor",
    "training",
    "training/data",
    "verification",
    "generation",
    "decoding",
    "load",
    "formats",
    "store",
    "prompts",
    "drafters",
    "targets",
    "rules",
    "engine",
    "files",
    "progress",
    "errors",
)
DOORS = ("__main__", "training.__main__")  # accelerate launches the second one
THEIRS = ("dflash/", "specforge/", "vllm/")  # paths in other projects that documents speak of
LAZY = ("cli", "__init__")  # who may import the project's own modules inside of functions: their start-up is waited for


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    """A file's dotted name in the package; a folder's for its ``__init__``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in files()}


def room_of(name: str) -> str:
    """The innermost room that a module stands in; what ``python -m`` runs is a door of the whole house."""
    if name in DOORS:
        return "__main__"
    place = name.replace(".", "/")
    rooms = [room for room in ROOMS if place == room or place.startswith(room + "/")]
    return max(rooms, key=len) if rooms else ""


def imports_of(text: str) -> list[tuple[str, int, bool]]:
    """What a file takes from the project: module, line, and whether inside of a function."""
    tree = ast.parse(text)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {id(node) for outer in ast.walk(tree) if isinstance(outer, functions) for node in ast.walk(outer)}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.partition(".")[0] in ("blockdraft", ""):
                place = name.removeprefix("blockdraft.")
                known = next((p for p in (place, place.rpartition(".")[0]) if p in MODULES and p != "__init__"), None)
                found.append((known or name, node.lineno, id(node) in inner))
    return found


def third_parties(text: str) -> set[str]:
    """The packages that a file takes from elsewhere."""
    tree = ast.parse(text)
    whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*whole, *parts)}


def faults(modules: dict[str, str]) -> list[str]:
    """Everything that breaks the rules, one sentence each; ``modules``: text by name."""
    found = []
    arrows: dict[str, set[str]] = {}
    for name, text in modules.items():
        if name == "__init__":  # the front door: it names what is behind it, and loads it on first use
            continue
        here = room_of(name)
        if not here:
            found.append(f"{name} stands in no room: give it one in ROOMS")
            continue
        if MODULES.get(name, Path(name)).name == "__init__.py" and imports_of(text):
            found.append(f"{name}/__init__.py imports from the project: a room is entered file by file")
        if "importlib" in third_parties(text) and not set(re.findall(r"importlib import (.*)", text)) <= {"resources", "util"}:
            found.append(f"{name} imports by name (importlib), which nobody can follow")
        for other, line, lazy in imports_of(text):
            if other == "blockdraft.__version__":
                continue
            there = room_of(other)
            if other not in MODULES:
                found.append(f"{name}:{line} imports {other}: name the file that it stands in")
                continue
            arrows.setdefault(name, set()).add(other)
            if lazy and here not in LAZY:
                found.append(f"{name}:{line} imports {other} inside of a function: only {' and '.join(LAZY)} may")
            if there != here and ROOMS.index(there) < ROOMS.index(here):
                found.append(f"{name}:{line} ({here}) imports {other}, which stands above it ({there})")
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found.append(f"a circle: {' -> '.join(error.args[1])}")
    return found


def texts() -> dict[str, str]:
    return {name: path.read_text() for name, path in MODULES.items()}


def test_imports_run_downwards():
    assert not faults(texts())


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("engine.cache", "from blockdraft.drafters.dflash import DFlashDrafter", "stands above it (drafters)"),
        ("training.data.corpus", "from blockdraft.training.trainer import Trainer", "stands above it (training)"),
        ("store", "def f():\n    from blockdraft.files import lock", "inside of a function"),
        ("engine.kernels", "import blockdraft.engine.packing", "a circle"),
        ("attic", "", "stands in no room"),
        ("engine.cache", "from blockdraft import load_target", "name the file"),
        ("engine.cache", "import blockdraft", "name the file"),
        ("engine.cache", "from ..drafters import dflash", "name the file"),
        ("engine.cache", "from blockdraft.nowhere import x", "name the file"),
        ("engine.cache", "from importlib import import_module", "imports by name"),
        ("store", "async def f():\n    from blockdraft.files import lock", "inside of a function"),
        ("rules", "from blockdraft.rules.accept import follow", "entered file by file"),
        ("bench.__main__", "from blockdraft.cli.main import main", "stands above it (cli)"),
    ],
)
def test_who_breaks_it_is_told(name, line, told):
    broken = texts()
    broken[name] = broken.get(name, "") + "\n" + line + "\n"
    assert any(told in fault and name in fault for fault in faults(broken)), faults(broken)


def test_the_front_door_loads_nothing():
    """``import blockdraft`` is waited for: what it names it imports on first use."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    waiting = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", None) for node in waiting} == {"importlib", "typing"}


def test_no_file_is_too_long():
    long = {name: count for name, path in MODULES.items() if (count := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, f"longer than {MOST_LINES} lines: {long}; find the noun that hides in it"


def test_the_document_shows_the_same_rooms():
    """The list in the document, in its order, is ``ROOMS``."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.split("## Rooms")[1].split("```")[1]
    shown = [line.split()[0].rstrip("/").removesuffix(".py") for line in block.splitlines() if line and not line.startswith(" ")]
    assert shown == list(ROOMS)


def test_the_picture_shows_the_arrows():
    """``python scripts/draw_house.py`` draws it anew; its three rooms that everybody uses have no arrows."""
    drawn = set(re.findall(r"<title>(\S+) takes from (\S+):", (ROOT / "docs" / "house.svg").read_text()))
    now = {(room_of(name), room_of(other)) for name, text in texts().items() for other, _, _ in imports_of(text)}
    assert drawn == {(room, other) for room, other in now if room and other and room != other and other not in ROOMS[-3:]}


def test_documents_name_files_that_are_there():
    """Every path in backticks that ends like source is one from the root or from src/blockdraft."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "data" / "answers" / "README.md"]
    for document in documents:
        for path in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|sh|yaml|md))`", document.read_text()):
            theirs = path.startswith(THEIRS)
            assert theirs or (ROOT / path).exists() or (SOURCE / path).exists(), f"{document.name} names {path}"


def test_every_room_is_there():
    for room in ROOMS:
        assert (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file(), room


def test_tests_mirror_the_rooms():
    """A folder of tests has the name of a room, or of what needs a real model or a GPU."""
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {".", "reality", "gpu"} <= set(ROOMS)
