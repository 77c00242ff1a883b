"""What the launches of the Triton kernels share.

Programmatic dependent launch (PDL): a kernel starts while the one before it still runs. Such a kernel calls
`gdc_wait` and, right after it, `gdc_launch_dependents` in every program, before any return and before it reads what an
earlier kernel wrote. What no kernel of the chain writes (weights) it may load before.
"""

from typing import Any

_PLAIN: dict[str, Any] = {}
_DEPENDENT: dict[str, Any] = {"launch_pdl": True}


def pdl_options(pdl: bool) -> dict[str, Any]:
    """The launch option that goes with a kernel's ``PDL=pdl``. None without: the interpreter of Triton has none."""
    return _DEPENDENT if pdl else _PLAIN


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (n >= 1)."""
    return 1 << (n - 1).bit_length()
