"""Compiling the engine's kernels for an H200 on a machine without a GPU.

`pretend` makes a process believe that its tensors, which lie on the CPU, lie on a GPU: the engine then launches its
Triton kernels, and every launch is noted instead of run. What a launch would have compiled is a `Variant`, and
`compile_all` compiles them. A process that pretends is good for nothing else: tests start one of its own, in which
Triton's interpreter was never asked for.
"""

import contextlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.ptx import UNKNOWN, dependent_launch

TARGET = GPUTarget("cuda", 90, 32)
TENSOR_CORE = re.compile(r"^\s*(?:wgmma\.mma_async|mma\.sync)\.\S*\.(?:bf16|f16)\.", re.MULTILINE)
PRODUCT = re.compile(r"tt\.dot .*: tensor<\w+x(bf16|f16|f32)\b")
PRODUCT_OF_THREADS = re.compile(r"tt\.dot .*-> tensor<\w+, #blocked")


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A form of a function that is compiled on its own: for such types, constants, options, divisors of arguments."""

    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    options: Any
    attributes: dict[tuple[int, ...], Any]

    @property
    def name(self) -> str:
        return str(self.function.fn.__name__)

    @property
    def module(self) -> str:
        return str(self.function.fn.__module__)

    @property
    def arguments(self) -> list[str]:
        """Those that the compiled kernel has, in its order."""
        return [name for name, kind in self.signature.items() if kind != "constexpr"]

    @property
    def form(self) -> str:
        """Constants, warps and stages, types; "!" marks pointers and numbers that 16 is not known to divide."""
        names = self.function.arg_names
        constants = [f"{names[path[0]]}={value}" for path, value in self.constants.items()]
        divided = {names[path[0]] for path, value in self.attributes.items() if value}
        types = [f"{name}:{self.signature[name]}{'' if name in divided else '!'}" for name in self.arguments]
        launch = f"warps={self.options.num_warps}, stages={self.options.num_stages}"
        return f"{self.name}({', '.join([*constants, launch])}; {' '.join(types)})"


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is known of a compiled variant. ``error``: what the compiler said, empty where it did not complain.

    ``shared`` bytes; ``stack`` bytes of local memory per thread, None where the tool that tells is missing; products
    of half types and those of any type that threads do one by one; ``tensor_core`` instructions of half types in PTX.
    The rest as in `tests.kernels.ptx`, with the names of arguments.
    """

    name: str
    form: str
    dependent: bool
    error: str = ""
    shared: int = 0
    stack: int | None = None
    half_products: int = 0
    thread_products: int = 0
    tensor_core: int = 0
    waits: int = 0
    launches: int = 0
    returns_before: int = 0
    writes_before: int = 0
    reads_before: tuple[str, ...] = ()


@dataclass(slots=True)
class Launches:
    """Every launch since `pretend`: ``variants`` by key, and ``keys`` in the order of the launches."""

    variants: dict[str, Variant] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def take(self) -> list[str]:
        """The keys since the last call."""
        keys = list(self.keys)
        self.keys.clear()
        return keys


def pretend() -> Launches:
    """From now on this process takes its tensors for those of a GPU, launches nothing and multiplies nothing."""
    launches = Launches()

    def note(function: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any,
             warmup: bool) -> _Noted:  # fmt: skip
        name = f"{function.fn.__module__}.{function.fn.__name__}{key}"
        launches.variants[name] = Variant(function, signature, constants, options, attributes)
        function.device_caches[device][0][key] = noted = _Noted(name, launches.keys)
        return noted

    driver.set_active(_Driver())
    # Where Triton has no kernel for the arguments of a launch yet.
    JITFunction._do_compile = note
    setattr(Tensor, "is_cuda", property(lambda tensor: True))  # noqa: B010 (declared as read-only)
    torch.cuda.CUDAGraph = _Graph  # type: ignore[misc, assignment]
    torch.cuda.graph = lambda *arguments, **options: contextlib.nullcontext()  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment, return-value]
    torch.mm = torch.addmm = lambda *operands, out, **options: out  # type: ignore[assignment]
    return launches


class Stream:
    """Of a device that has nothing to do."""

    def synchronize(self) -> None:
        pass


class _Noted:
    """A compiled kernel, as far as a launch knows."""

    function = packed_metadata = None

    def __init__(self, key: str, keys: list[str]) -> None:
        self._key, self._keys = key, keys

    def launch_metadata(self, *arguments: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        self._keys.append(self._key)


class _Graph:
    def replay(self) -> None:
        pass


class _Driver:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


# -- compiling --------------------------------------------------------------------------------------------------


def compile_all(variants: Iterable[Variant]) -> list[Kernel]:
    """Compile with all cores. Processes are forked, because a variant holds functions."""
    _VARIANTS[:] = variants
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        return pool.map(_compile, range(len(_VARIANTS)), chunksize=1)


_VARIANTS: list[Variant] = []


def _compile(number: int) -> Kernel:
    variant = _VARIANTS[number]
    known: dict[str, Any] = {
        "name": variant.name,
        "form": variant.form,
        "dependent": bool(variant.options.launch_pdl),
    }
    source = ASTSource(variant.function, variant.signature, variant.constants, variant.attributes)
    try:
        compiled = triton.compile(source, target=TARGET, options=variant.options.__dict__)
    except Exception as error:  # of any kind: it is what the test is about
        return Kernel(**known, error=f"{type(error).__name__}: {error}")
    ptx, arguments = compiled.asm["ptx"], variant.arguments
    found = dependent_launch(ptx)
    reads = [number if number == UNKNOWN else arguments[int(number)] for number in found.reads_before]
    pointers = [name for name in reads if name == UNKNOWN or str(variant.signature[name]).startswith("*")]
    return Kernel(
        **known,
        shared=compiled.metadata.shared,
        stack=_stack(compiled.asm["cubin"]),
        half_products=sum(kind != "f32" for kind in PRODUCT.findall(compiled.asm["ttir"])),
        thread_products=len(PRODUCT_OF_THREADS.findall(compiled.asm["ttgir"])),
        tensor_core=len(TENSOR_CORE.findall(ptx)),
        waits=found.waits,
        launches=found.launches,
        returns_before=found.returns_before,
        writes_before=found.writes_before,
        reads_before=tuple(sorted(map(str, pointers))),
    )


def _stack(cubin: bytes) -> int | None:
    """Bytes of local memory per thread: registers that were spilled, and arrays."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(number) for number in re.findall(r"\b(?:STACK|LOCAL):(\d+)", told))
