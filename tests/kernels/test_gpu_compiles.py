"""Every kernel of the engine compiles for an H200, fits it, and does in order what dependent launch asks of it.

No GPU is needed, and nothing is run: a process of its own (`tests.kernels.compile_cases`) starts the engine for models
of real shapes on tensors that pretend to lie on a GPU, and compiles what that launches.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kernels.compile_cases import BATCHES, MODELS, PADDED, SERVED, UNPADDED
from tests.kernels.offline import Kernel
from tests.kernels.ptx import UNKNOWN, dependent_launch

ROOT = Path(__file__).resolve().parents[2]
# What one program may have on an H200, of the 228 KiB of a multiprocessor.
MAX_SHARED = 227 * 1024
# In float32 this one spills: its sums of two products are large, and its tile is the one for half types.
SPILLS_FLOAT32 = {"_skinny_gate_up_silu"}
# Whose sums of products belong to tensor cores.
PRODUCTS = {"_skinny_gemm", "_skinny_gate_up_silu", "_attend_split", "_prefill_kernel"}
# What no kernel of a step writes: a dependent kernel may read it before it waits. Lengths and tables are written before
# the first of them, and of the caches they read all but the newest token there, which tests of values hold.
WEIGHTS = {"w", "norm", "bias", "weight_ptr", "bias_ptr", "q_norm_ptr", "k_norm_ptr"}
CONTEXT = {"k_cache", "v_cache", "tables", "rows", "lens"}
# What each has to read before it waits, for that is what dependent launch is for.
READ_BEFORE: dict[str, set[str]] = {
    "_norm_qkv_rope_store": {"w"},
    "_gemv_add": {"w"},
    "_norm_gate_up_silu": {"w"},
    "_norm_head": {"w"},
    "_skinny_gemm": {"w"},
    "_skinny_gate_up_silu": {"w"},
    "_add_rmsnorm_kernel": {"weight_ptr"},
    "_rope_and_store_kernel": set(),
    "_attend_split": {"k_cache", "v_cache"},
    "_combine_splits": set(),
}
CASES = [case for model in MODELS for case in model.cases]
DECODE = [case for case in CASES if "-decode-" in case and not case.endswith("-decode-128")]


@dataclass(frozen=True, slots=True)
class Compiled:
    """By case the kernels in the order of their launches; by engine and kind of batch what was not compiled before."""

    cases: dict[str, list[Kernel]]
    served: dict[str, list[str]]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    directory = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(directory / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.compile_cases", str(directory / "compiled.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads((directory / "compiled.json").read_text(encoding="utf-8"))
    kernels = [Kernel(**known) for known in content["kernels"]]
    cases = {case: [kernels[number] for number in numbers] for case, numbers in content["cases"].items()}
    return Compiled(cases, content["served"])


# -- what is wrong with a kernel ----------------------------------------------------------------------------------


def does_not_fit(kernel: Kernel) -> str:
    if kernel.error:
        return kernel.error
    return f"{kernel.shared} bytes of shared memory" if kernel.shared > MAX_SHARED else ""


def spills(kernel: Kernel) -> str:
    return f"{kernel.stack} bytes of local memory" if kernel.stack else ""


def multiplies_without_tensor_cores(kernel: Kernel) -> str:
    if kernel.half_products and (kernel.thread_products or not kernel.tensor_core):
        return f"{kernel.half_products} products, {kernel.tensor_core} instructions of tensor cores"
    return "products are gone" if kernel.name in PRODUCTS and not kernel.half_products else ""


def breaks_the_order(kernel: Kernel) -> str:
    """Against the rules of `kernels.gpu.launch`."""
    if not kernel.dependent:
        return "waits without being launched so" if kernel.waits or kernel.launches else ""
    must, reads = READ_BEFORE.get(kernel.name, {"w"}), set(kernel.reads_before)
    may = WEIGHTS | CONTEXT if kernel.name in ("_attend_split", "_combine_splits") else WEIGHTS
    faults = {
        f"{kernel.waits} waits": kernel.waits != 1,
        f"lets the next kernel start in {kernel.launches} places": kernel.launches != 1,
        "returns before it waits": kernel.returns_before > 0,
        "writes before it waits": kernel.writes_before > 0,
        f"reads {reads - may} before it waits": bool(reads - may),
        f"does not read {must - reads} before it waits": bool(must - reads),
    }
    return ", ".join(fault for fault, found in faults.items() if found)


def check(kernels: list[Kernel], fault: Callable[[Kernel], str]) -> None:
    assert kernels
    faults = {f"{kernel.form}: {found}" for kernel in kernels if (found := fault(kernel))}
    assert not faults, "\n".join(sorted(faults))


# -- the engine's kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*CASES, "store"])
def test_kernels_compile_and_fit(compiled: Compiled, case: str) -> None:
    check(compiled.cases[case], does_not_fit)


@pytest.mark.parametrize("case", [*CASES, "store"])
def test_no_register_is_spilled(compiled: Compiled, case: str) -> None:
    if any(kernel.stack is None for kernel in compiled.cases[case]):
        pytest.skip("cuobjdump is not where Triton has it: local memory was not looked at")
    known = SPILLS_FLOAT32 if "-float32-" in case else set()
    check([kernel for kernel in compiled.cases[case] if kernel.name not in known], spills)


@pytest.mark.parametrize("case", [case for case in CASES if "-float32-" not in case])
def test_products_use_tensor_cores(compiled: Compiled, case: str) -> None:
    check(compiled.cases[case], multiplies_without_tensor_cores)


@pytest.mark.parametrize("case", CASES)
def test_dependent_kernels_wait(compiled: Compiled, case: str) -> None:
    check(compiled.cases[case], breaks_the_order)


@pytest.mark.parametrize("case", DECODE)
def test_a_step_is_a_chain_of_dependent_kernels(compiled: Compiled, case: str) -> None:
    """All but the first two: the second waits for all that the first wrote, so that nobody after it has to."""
    names = [kernel.name for kernel in compiled.cases[case]]
    starts = [number for number, name in enumerate(names) if name == "_begin_decode"]
    assert starts
    for start in starts:
        step = [compiled.cases[case][start]]
        for kernel in compiled.cases[case][start + 1 :]:
            if kernel.name not in READ_BEFORE and kernel.name != "_rmsnorm_kernel":
                break
            step.append(kernel)
        assert len(step) > 10
        assert [kernel.name for kernel in step[2:] if not kernel.dependent] == []
        assert not step[0].dependent
        assert not step[1].dependent


def test_no_kernel_is_forgotten(compiled: Compiled) -> None:
    """Every function that is launched somewhere in `kernels.gpu`."""
    launched = set()
    for path in (ROOT / "kernels" / "gpu").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert isinstance(node.func.value, ast.Name)
                launched.add(node.func.value.id)
    seen = {kernel.name for case, kernels in compiled.cases.items() if case != "wrong" for kernel in kernels}
    assert len(launched) > 20
    assert launched - {"list", "tuple", "dict"} == seen


# -- serving ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", [f"{engine.name}-{kind}" for engine in SERVED for kind in (*BATCHES, PADDED)])
def test_nothing_is_compiled_while_requests_wait(compiled: Compiled, case: str) -> None:
    """Batches of many numbers of tokens and sequences need no form of a kernel that the start did not compile."""
    new = compiled.served[case]
    assert not new, "\n".join(new)


@pytest.mark.parametrize("engine", [engine.name for engine in SERVED])
def test_a_batch_that_is_not_padded_would_be(compiled: Compiled, engine: str) -> None:
    assert compiled.served[f"{engine}-{UNPADDED}"]


# -- the checks themselves --------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Kernel], str], str]] = {
    "_returns_early": (breaks_the_order, "returns before it waits"),
    "_writes_early": (breaks_the_order, "writes before it waits"),
    "_reads_early": (breaks_the_order, "reads {'x'} before it waits"),
    "_waits_at_times": (breaks_the_order, "returns before it waits, writes before it waits"),
    "_never_waits": (breaks_the_order, "0 waits, lets the next kernel start in 0 places"),
    "_loads_late": (breaks_the_order, "does not read {'w'} before it waits"),
    "_spills": (spills, "bytes of local memory"),
    "_shares_too_much": (does_not_fit, "294912 bytes of shared memory"),
    "_does_not_compile": (does_not_fit, "arange's range must be a power of 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_noticed(compiled: Compiled, name: str) -> None:
    fault, message = WRONG[name]
    (kernel,) = (kernel for kernel in compiled.cases["wrong"] if kernel.name == name)
    if fault is spills and kernel.stack is None:
        pytest.skip("cuobjdump is not where Triton has it: local memory was not looked at")
    assert message in fault(kernel)


def test_products_of_threads_are_noticed(compiled: Compiled) -> None:
    """Those of float32, for want of a way to have them in bfloat16."""
    products = [kernel for kernel in compiled.cases["smollm2-135m-float32-decode-8"] if kernel.name in PRODUCTS]
    assert products
    assert all(kernel.thread_products and not kernel.tensor_core for kernel in products)
    assert all(multiplies_without_tensor_cores(kernel) for kernel in products)


PTX = """
.visible .entry f(
	.param .u64 .ptr .global .align 1 f_param_0,
	.param .u64 .ptr .global .align 1 f_param_1
)
.reqntid 128
{
	.reg .b64 	%rd<9>;
$L__func_begin0:
	.loc	1 38 0                          // launch.py:38:0
	ld.param.b64 	%rd1, [f_param_0];
	ld.param.b64 	%rd2, [f_param_1];
BEFORE
	// begin inline asm
	griddepcontrol.wait; // dummy %r1
	// end inline asm
	st.global.b32 [ %rd1 + 0 ], { %r2 };
$L__BB0_2:
	ret;
$L__tmp1:
}
	.section	.debug_abbrev
	{
.b8 1
	}
"""


@pytest.mark.parametrize(
    ("before", "returns", "writes", "reads"),
    [
        ("", 0, 0, ()),
        ("ld.global.b32 %r1, [%rd2];", 0, 0, (1,)),
        ("add.s64 %rd3, %rd1, 4;\n mov.b64 %rd4, %rd3;\n @%p1 ld.global.v2.b32 {%r1, %r2}, [%rd4 + 8];", 0, 0, (0,)),
        ("mov.b64 %rd3, f_param_1;\n ld.param.b64 %rd4, [%rd3];\n ld.global.b32 %r1, [%rd4];", 0, 0, (1,)),
        ("ld.global.b32 %r1, [%rd1];\n mad.wide.s32 %rd3, %r1, 4, %rd2;\n ld.global.b32 %r2, [%rd3];", 0, 0, (0, 1)),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r2;", 0, 0, (1,)),
        ("ld.global.b32 %r1, [%rd7];", 0, 0, (UNKNOWN,)),
        ("@%p1 bra \t$L__BB0_2;", 1, 0, ()),
        ("@%p1 bra \t$L__BB0_1;\n ret;\n$L__BB0_1:", 1, 0, ()),
        ("bra.uni $L__BB0_1;\n ret;\n$L__BB0_1:", 0, 0, ()),
        ("@%p1 ret;", 1, 0, ()),
        ("@%p1 st.global.b32 [ %rd1 + 0 ], { %r2 };", 0, 1, ()),
        ("atom.global.gpu.acq_rel.add.s32 %r1, [%rd1], 1;", 0, 1, ()),
        ("@%p1 griddepcontrol.wait;\n@%p1 bra $L__BB0_2;", 1, 0, ()),
        ("st.shared.b32 [%r1], %r2;\n bar.sync 0;\n griddepcontrol.launch_dependents;", 0, 0, ()),
    ],
)
def test_ptx_is_read(before: str, returns: int, writes: int, reads: tuple[int | str, ...]) -> None:
    found = dependent_launch(PTX.replace("BEFORE", before))
    assert (found.returns_before, found.writes_before, found.reads_before) == (returns, writes, reads)
    assert (found.waits, found.launches) == (1 + before.count("wait"), before.count("launch_dependents"))


def test_static_loops_count_without_cdiv() -> None:
    """Triton 3.6 takes `tl.cdiv` of constants for a number of the GPU; the version that is pinned here does not."""
    for path in (ROOT / "kernels" / "gpu").glob("*.py"):
        assert "static_range(tl.cdiv" not in path.read_text(encoding="utf-8"), path.name
