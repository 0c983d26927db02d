"""How long a person waits before anything happens: whole processes, medians.

python benchmarks/startup.py
"""

import subprocess
import sys
import time
from statistics import median

CASES = {
    "python -c pass": ["-c", "pass"],
    "import blockdraft": ["-c", "import blockdraft"],
    "blockdraft --help": ["-m", "blockdraft", "--help"],
    "blockdraft train --help": ["-m", "blockdraft", "train", "--help"],
}
RUNS = 15


def seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    for arguments in CASES.values():
        seconds(arguments)  # the first one reads from the disk
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):
        for name, arguments in CASES.items():
            taken[name].append(seconds(arguments))
    bare = median(taken["python -c pass"])
    for name, runs in taken.items():
        print(f"{name}: {median(runs):.3f} s, {median(runs) - bare:.3f} more than Python alone (least {min(runs):.3f})")
