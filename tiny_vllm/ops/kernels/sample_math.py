"""The sampler's random numbers and functions, on the device.

Integers are equal bit for bit. Logarithms and exponentials are those of CUDA's library, as
torch takes them on a GPU: Triton's own are approximations. Its interpreter lacks the library.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MAX_UNIFORM = tl.constexpr(1 - 2.0**-24)
_TO_UNIFORM = tl.constexpr(2.0**-31)


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64 on a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scramble(x):  # type: ignore[no-untyped-def]
    """The finaliser of MurmurHash3 on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def step_key(seed, num_outputs):  # type: ignore[no-untyped-def]
    """Two uint32 words from an int64 seed and the position of the token to draw."""
    position = (num_outputs + 1).to(tl.uint64)
    x = _mix64(_mix64(seed.to(tl.uint64)) + position * 0x9E3779B97F4A7C15)
    return (x >> 32).to(tl.uint32), x.to(tl.uint32)


@triton.jit
def uniform_numbers(key_0, key_1, ids):  # type: ignore[no-untyped-def]
    """Numbers in (0, 1) of (key, token id), small ones in full precision."""
    x = _scramble(_scramble(ids.to(tl.uint32) * 0x9E3779B9 + key_0) ^ key_1)
    x = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    return tl.minimum((x + 0.5) * _TO_UNIFORM, _MAX_UNIFORM)


@triton.jit
def gumbel_noise(uniform):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise: -log(-log1p(-uniform))."""
    if _INTERPRETED:
        noise = -tl.log(-tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32))
    else:
        noise = -libdevice.log(-libdevice.log1p(-uniform))
    return noise


@triton.jit
def mass_below(depth):  # type: ignore[no-untyped-def]
    """exp(-depth)."""
    if _INTERPRETED:
        mass = tl.exp(-depth)
    else:
        mass = libdevice.exp(-depth)
    return mass
