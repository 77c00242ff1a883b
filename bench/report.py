"""What the benchmarks share: medians with their spread, the conditions of a run, JSON and a table."""

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy")


def spread(values: list[float]) -> dict[str, float]:
    """Median, min and max of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 by nearest rank, mean, max and count; {} of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 90, 99)}
    return ranks | {"mean": statistics.fmean(ordered), "max": ordered[-1], "count": float(len(ordered))}


def conditions(device: str) -> dict[str, Any]:
    """Commit, versions and hardware: what a figure is worth nothing without. Without git, COMMIT is the commit."""
    import torch

    return {
        "commit": _git("rev-parse", "HEAD") or os.environ.get("COMMIT", ""),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cuda": torch.version.cuda if device == "cuda" else None,
    }


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """To ``path``, or nowhere."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(f"written: {path}", file=sys.stderr)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns wide enough for their longest cell; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
