"""A copy task: prompts that ask for text that is already there, changed a little. Derived by rule from the evaluation data.

    python benchmarks/copying.py copying.jsonl [--data-dir DIR]
    blockdraft bench --tasks copying.jsonl --methods ar,dflash,dflash-tree,lookup --limit 24

Twelve functions of HumanEval to be repeated with another name, six word problems of GSM8K to be written one sentence to a line, and
six tasks of self-instruct to be quoted word for word.
"""

import argparse
import json
import re
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "eval"


def rows(folder: Path, task: str) -> list[str]:
    return [json.loads(line)["turns"][0] for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def renamed(text: str) -> str | None:
    """Ask for a function's code with another name."""
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    name = re.search(r"def (\w+)\(", code.group(1)) if code else None
    if code is None or name is None:
        return None
    asked = f"Rename the function {name.group(1)} to solve. Repeat the whole code with this change:"
    return f"{asked}\n```python\n{code.group(1).strip()}\n```"


def listed(text: str) -> str:
    """Ask for a word problem, one sentence to a line."""
    return f"Write this text again with each sentence on its own line:\n\n{text.split(chr(10))[0]}"


def quoted(text: str) -> str:
    return f'Repeat the following text word for word:\n\n"{text.strip()}"'


def prompts(folder: Path) -> list[str]:
    code = [made for text in rows(folder, "humaneval") if (made := renamed(text))][:12]
    lists = [listed(text) for text in rows(folder, "gsm8k")[:6]]
    quotes = [quoted(text) for text in rows(folder, "self-instruct") if 200 <= len(text) <= 900][:6]
    return code + lists + quotes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, default=DATA)
    args = parser.parse_args()
    made = prompts(args.data_dir)
    args.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in made))
    print(f"{len(made)} prompts in {args.out}")


if __name__ == "__main__":
    main()
