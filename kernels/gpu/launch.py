"""What the launches of the Triton kernels share.

Programmatic dependent launch (PDL): a kernel starts while those before it still run. In every program of such a kernel
`wait_for_earlier_kernels` stands before any return, and before it reads anything that a kernel of the chain wrote or
writes anything. Before it a program may load what no kernel of the chain writes (weights, the KV of earlier tokens,
lengths): the first kernel after the one that writes those is launched without PDL, so they are complete.

The programs of the next kernel may start once all of ours have started, not once the kernel before us has ended: the
weights of several kernels are under way while one with little to read (attention) waits for its own inputs. Each waits
for the end of the kernel right before it, and that one has waited in turn; so order holds over the chain.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PLAIN: dict[str, Any] = {}
_DEPENDENT: dict[str, Any] = {"launch_pdl": True}


def pdl_options(pdl: bool) -> dict[str, Any]:
    """The launch option that goes with a kernel's ``PDL=pdl``. None without: the interpreter of Triton has none."""
    return _DEPENDENT if pdl else _PLAIN


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (n >= 1)."""
    return 1 << (n - 1).bit_length()


@triton.jit
def wait_for_earlier_kernels(PDL: tl.constexpr) -> None:
    """Let the next kernel's programs start, then wait for the kernels before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
