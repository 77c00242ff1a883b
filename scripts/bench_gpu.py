"""`make bench-gpu`: the benchmarks that the docs quote, one after the other on one GPU, each with a limit of its own.

    python -m scripts.bench_gpu --out results --only decode serve --model models/qwen2.5-1.5b

What is cheap and matters most comes first; the first engine compiles what the others find compiled. Of each run there
are NAME.json, NAME.txt (its table) and NAME.err.txt in --out; the tables are printed at the end. A run that fails or
takes too long does not stop the others. Exits 1 when one failed.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 10.0
LEAST_SECONDS = 15.0  # less is not worth a start


@dataclass(frozen=True)
class Run:
    """``limit``: seconds it may take."""

    name: str
    module: str
    limit: float
    options: str


SERVE = "--concurrency 1 128 --prompt-tokens 128 --output-tokens 256 --clients 4 --server "
SERVER = "--max-num-seqs 256 --max-num-batched-tokens 8192"
RUNS = [
    Run(
        "decode", "bench.decode", 210,
        "--batches 1 8 32 128 256 --contexts 128 1024 8192 --rounds 3 --profile-steps 40 --peer-steps 5 --no-compile",
    ),
    Run("timeline", "bench.timeline", 70, "--batches 1 32 --context 1024 --steps 200"),
    Run("prefill", "bench.prefill", 70, "--max-num-batched-tokens 8192 --rounds 5"),
    Run("ladder", "bench.ladder", 90, "--contexts 128 1024"),
    Run("kernels", "bench.kernels", 120, "--rounds 3"),
    Run("mixed", "bench.mixed", 80, "--rates 0 5 15 30 --rounds 1 --seconds 4"),
    Run("serve-1-front", "bench.serve", 80, f"{SERVE} '{SERVER}'"),
    Run("serve-3-fronts", "bench.serve", 80, f"{SERVE} '{SERVER} --front-processes 3'"),
    Run(
        "peer-compiled", "bench.decode", 120,
        "--batches 1 --contexts 1024 --rounds 3 --steps 20 --profile-steps 0 --whole-tokens 0 --compile",
    ),
]  # fmt: skip


def chosen(only: list[str]) -> list[Run]:
    """Runs by name or by the first word of it. Raises SystemExit for a name that is none."""
    first_words = {run.name.split("-")[0] for run in RUNS}
    if unknown := set(only) - first_words - {run.name for run in RUNS}:
        raise SystemExit(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(known_names())}")
    return [run for run in RUNS if not only or {run.name, run.name.split("-")[0]} & set(only)]


def known_names() -> list[str]:
    return [run.name for run in RUNS]


def command(run: Run, args: argparse.Namespace) -> list[str]:
    made = [sys.executable, "-m", run.module, "--device", args.device, "--shape", args.shape, *shlex.split(run.options)]
    made += ["--json", str(args.out / f"{run.name}.json")]
    if run.module == "bench.serve" and args.model is not None:
        made += ["--model", str(args.model)]
    if run.module == "bench.timeline":
        made += ["--markdown", str(args.out / f"{run.name}.md")]
    return made


def perform(run: Run, args: argparse.Namespace, seconds: float) -> str:
    """Run it for at most ``seconds``. Returns how it ended: `done`, or why not."""
    with (args.out / f"{run.name}.txt").open("w") as out, (args.out / f"{run.name}.err.txt").open("w") as err:
        process = subprocess.Popen(
            command(run, args), stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            end(process)
    return "done" if code == 0 else f"exit code {code}: {last_line(args.out / f'{run.name}.err.txt')}"


def end(process: subprocess.Popen[bytes]) -> None:
    """What is left of the process and of those it started: all are in its session."""
    for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    made.add_argument("--only", nargs="*", default=[], metavar="NAME", help=", ".join(known_names()))
    made.add_argument("--model", type=Path, metavar="DIR", help="for serve; unset = made of the shape")
    made.add_argument("--seconds", type=float, default=480.0, metavar="N", help="for all of them")
    made.add_argument("--shape", default="qwen2.5-1.5b")
    made.add_argument("--device", default="cuda")
    return made.parse_args()


def main() -> int:
    args = arguments()
    runs = chosen(args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    begun, outcomes, tables = time.monotonic(), list[str](), list[str]()
    for run in runs:
        start = time.monotonic()
        left, ended = args.seconds - (start - begun), "not begun: no time is left"
        if left >= LEAST_SECONDS:
            ended = perform(run, args, min(run.limit, left))
            tables.append(f"== {run.name}: {run.options}\n{(args.out / f'{run.name}.txt').read_text()}")
        outcomes.append(f"{run.name:16} {time.monotonic() - start:6.1f} s  {ended}")
        print(outcomes[-1], file=sys.stderr, flush=True)
    print("\n".join([*tables, *outcomes]))
    return int(any(not outcome.endswith("done") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
