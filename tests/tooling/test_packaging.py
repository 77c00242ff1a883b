"""The wheel, and the client as a user installs it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("clients", "engine", "kernels", "protos", "service")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files behind, and a stale build/ would end up in the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--wheel-dir", str(target), str(source)], check=True, timeout=250)
    (built,) = target.glob("picovllm-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_five_packages_and_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert "clients/service_config.json" in names
    assert "protos/picovllm/inference/v1/inference.proto" in names


@pytest.mark.slow
def test_the_client_runs_without_the_server_side(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    constraints = ["--constraint", str(ROOT / "requirements" / "constraints.txt")]
    subprocess.run([*pip, *constraints, str(wheel)], check=True, timeout=250)
    command = [str(tmp_path / "venv" / "bin" / "picovllm"), "info", "--address", "127.0.0.1:1", "--deadline", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: UNAVAILABLE" in done.stderr
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True, timeout=60)
    assert "torch" not in listed.stdout
