"""Scripts that are prepared for machines other than this one: that they run here, with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_gpu_check_runs_without_a_gpu():
    """Rounds at a forced acceptance: a drafter that is right more often brings more tokens a round."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "cpu"],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["method"].partition(",")[0] for row in rows] == ["ar", "dflash", "dflash", "dflash"]
    brought = [row["tokens_per_round"] for row in rows]
    assert brought == sorted(brought) and brought[0] == 1 < brought[1] and brought[3] > 4
    assert all(row["round_ms"] > row["limit_ms"] > 0 for row in rows)
