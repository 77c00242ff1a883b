"""Options and fixtures shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch loads its OpenMP runtime, and for every process started here: idle threads sleep instead of spinning.
# Two processes whose threads spin on the same cores slow each other down tenfold and more.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MODELS = Path(__file__).resolve().parent.parent / "models"
COLLECTED = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where engine and kernel tests run (default: cpu)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Triton's decorators look at this when kernels are imported: on a CPU they run in its interpreter."""
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count what was collected, by folder of tests/, before any of it is deselected."""
    counts: dict[str, int] = {}
    for item in items:
        parts = item.path.relative_to(config.rootpath).parts
        counts[parts[1]] = counts.get(parts[1], 0) + 1
    config.stash[COLLECTED] = counts


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that threads gain nothing: on a busy machine their barriers cost 30 times the work."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The --device option."""
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted default model."""
    return _model_dir("smollm2")


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The random model for tests that are about serving and not about text."""
    return _model_dir("tiny")


def _model_dir(name: str) -> Path:
    if not (MODELS / name / "config.json").exists():
        pytest.fail(f"models/{name} is missing: run `make models`", pytrace=False)
    return MODELS / name
