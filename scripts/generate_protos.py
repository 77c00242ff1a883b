"""Generate the Python of protos/, or with ``--check`` fail when the committed files differ from what it would write.

protoc runs with the repository root as its include path, so the modules import as ``protos.picovllm...``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the generated files of every proto below ``target``, at their import paths."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/**/*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    include = str(Path(protoc.__file__).parent / "_proto")
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *protos]) != 0:
        raise SystemExit("protoc failed")


def generated_files(base: Path) -> dict[str, bytes]:
    """Content of the generated files below ``base``, by path."""
    found = (path for pattern in GENERATED for path in base.glob(f"protos/**/{pattern}"))
    return {str(path.relative_to(base)): path.read_bytes() for path in found}


def stale_files() -> list[str]:
    """Paths that are missing, left over or different from what would be generated."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        wanted, present = generated_files(Path(folder)), generated_files(ROOT)
    return sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the Python of protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed file differs")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    if stale := stale_files():
        print("generated code is out of date; run `make protos`:", *stale, sep="\n  ")
        return 1
    print("generated code is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
