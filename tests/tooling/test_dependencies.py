"""The dependency rule: which folder may import what, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "protos": {"protos"},
    "clients": {"clients", "protos"},
    "service": {"service", "engine", "protos"},
}
OURS = set(MAY_IMPORT) | {"tests", "scripts", "bench"}
# Libraries that belong to some folders only.
RESERVED = {
    "grpc": {"protos", "service", "clients"},
    "google": {"protos", "service", "clients"},
    "tokenizers": {"service"},
    "transformers": {"service"},
    "torch": {"kernels", "engine", "service"},
}
# What a process must not load when it starts, by the module it starts with.
NOT_LOADED = {
    "service.supervisor": {"torch", "grpc", "google", "transformers", "tokenizers"},
    "service.front": {"torch"},
    "service.engine_process": {"grpc", "google", "transformers", "tokenizers"},
}
# Pure Python, themselves and everything of ours that they import.
WITHOUT_TORCH = ("engine.scheduler", "engine.block_manager", "engine.limits", "engine.outputs", "engine.config")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth of its code, by full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; path = import is the rule"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(module: str) -> str:
    return module.partition(".")[0]


def module_path(module: str) -> Path | None:
    """The file of one of our modules, None for everything else."""
    base = ROOT.joinpath(*module.split("."))
    found = (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists())
    return next(found, None) if top(module) in MAY_IMPORT else None


def reachable(module: str) -> dict[str, Path]:
    """The module and every one of ours that importing it imports, packages included."""
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = module_path(name)
        if path is None or name in found:
            continue
        found[name] = path
        pending += [name.rpartition(".")[0], *imports(path)]
    return found


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    broken = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / folder).rglob("*.py")
        for module in imports(path)
        if top(module) in OURS - MAY_IMPORT[folder] or folder not in RESERVED.get(top(module), {folder})
    }
    assert not broken


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_is_pure_python(module: str) -> None:
    assert module_path(module) is not None
    with_torch = {name for name, path in reachable(module).items() if "torch" in map(top, imports(path))}
    assert not with_torch


@pytest.mark.parametrize("module", sorted(NOT_LOADED))
def test_a_process_loads_only_what_it_needs(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert NOT_LOADED[module].isdisjoint(done.stdout.split())
