"""The five folders at the root are the import names, in a checkout and installed."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = ("clients", "engine", "kernels", "protos", "service")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_this_repository_and_claimed_by_no_other_distribution(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin == str(ROOT / name / "__init__.py")
    assert set(importlib.metadata.packages_distributions().get(name, [])) <= {"picovllm"}


@pytest.mark.parametrize("name", NAMES)
def test_a_top_level_init_is_empty(name: str) -> None:
    """transformers probes a module named `kernels` when it is imported and finds ours: nothing may happen then."""
    assert (ROOT / name / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize("name", NAMES)
def test_every_folder_with_code_is_a_package(name: str) -> None:
    folders = {path.parent for path in (ROOT / name).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
