"""Programmatic dependent launch: a kernel starts while the one before it drains (Hopper).

A kernel that takes ``PDL`` waits before it touches what earlier kernels wrote, then lets
the next one start. By then everything two kernels back is complete, so a chain is safe as
long as each of its kernels waits.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stand at the head of a kernel of such a chain."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that takes ``PDL``."""
    return {"launch_pdl": True} if pdl else {}


def use_pdl(device: torch.device) -> bool:
    """True on Hopper and newer, unless ``TINY_VLLM_PDL=0``."""
    if os.environ.get("TINY_VLLM_PDL") == "0":
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
