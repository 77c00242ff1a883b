"""`make demo`, without make: the script it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_demo_answers_and_ends_well(smollm2_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "scripts.demo"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "8 generated" in done.stdout
    assert done.stdout.endswith("server drained, exit code 0\n")
