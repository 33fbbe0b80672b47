"""Rope scaling of a GGUF file: from metadata keys, or from the `rope_freqs.weight` tensor.

The converter turns Llama 3.1's scaling into one divisor per frequency. `_fit_llama3`
finds parameters that give these divisors back and refuses when none do.
"""

import math
import struct
from typing import Any

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_header import GgufHeader, GgufTensor

_FACTORS = "rope_freqs.weight"
_UNSUPPORTED_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_F32 = 0
_TOLERANCE = 1e-4  # relative; the file stores float32


def rope_scaling_from_gguf(
    header: GgufHeader, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The `rope_scaling` entry of a Hugging Face config, None without scaling.

    Raises:
        ModelLoadError: a scaling other than linear and llama3.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for name in _UNSUPPORTED_FACTORS:
        if name in tensors:
            raise ModelLoadError(f"{header.path}: rope scaling by {name!r} is not supported")
    by_key = _from_metadata(header)
    if _FACTORS not in tensors:
        return by_key
    divisors = _read_divisors(header, tensors[_FACTORS], head_dim // 2)
    if all(math.isclose(value, 1.0, rel_tol=_TOLERANCE) for value in divisors):
        return by_key
    scaling = None if by_key else _fit_llama3(header, theta, divisors)
    if scaling is None:
        raise ModelLoadError(
            f"{header.path}: the frequency factors in {_FACTORS!r} follow no llama3 scaling; "
            "other scalings are not supported"
        )
    return scaling


def _from_metadata(header: GgufHeader) -> dict[str, Any] | None:
    prefix = f"{header.architecture}.rope."
    kind = header.metadata.get(prefix + "scaling.type", "none")
    old_factor = header.metadata.get(prefix + "scale_linear")
    factor = float(header.metadata.get(prefix + "scaling.factor", old_factor or 1.0))
    if kind not in ("none", "linear"):
        raise ModelLoadError(
            f"{header.path}: {prefix}scaling.type is {kind!r}; supported are none, linear and "
            "llama3 factors"
        )
    if factor == 1.0 or (kind == "none" and old_factor is None):
        return None
    return {"rope_type": "linear", "factor": factor}


def _read_divisors(header: GgufHeader, tensor: GgufTensor, count: int) -> list[float]:
    if tensor.shape != (count,) or tensor.type_id != _F32:
        raise ModelLoadError(
            f"{header.path}: {_FACTORS!r} must hold {count} float32 values, it has shape "
            f"{tensor.shape} and storage type {tensor.type_id}"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def llama3_divisors(
    theta: float, count: int, factor: float, low: float, high: float, original: float
) -> list[float]:
    """What Llama 3.1's scaling divides each of ``count`` frequencies by."""
    divisors = []
    for index in range(count):
        turns = original * theta ** (-index / count) / (2 * math.pi)  # in the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _fit_llama3(header: GgufHeader, theta: float, divisors: list[float]) -> dict[str, Any] | None:
    """Parameters that give ``divisors`` back, the published ones first."""
    factor = float(f"{max(divisors):.6g}")
    stored = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    candidates = [(1.0, 4.0, stored or 8192), (1.0, 4.0, 8192), *_solve(theta, divisors, factor)]
    for low, high, original in candidates:
        given = llama3_divisors(theta, len(divisors), factor, low, high, original)
        pairs = zip(given, divisors, strict=True)
        if all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in pairs):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    return None


def _solve(theta: float, divisors: list[float], factor: float) -> list[tuple[float, float, int]]:
    """Solve for (low, high, original) from the outermost blended frequencies, if two exist.

    Between the bounds 1/divisor is linear in the frequency. Its two coefficients leave
    the common scale of the three unknowns open; low = 1 fixes it, as every model does.
    """
    count = len(divisors)
    blended = [i for i, value in enumerate(divisors) if 1.001 < value < factor * 0.999]
    if len(blended) < 2:
        return []
    first, last = blended[0], blended[-1]
    freqs = [theta ** (-i / count) / (2 * math.pi) for i in (first, last)]
    smooth = [(1 / divisors[i] - 1 / factor) / (1 - 1 / factor) for i in (first, last)]
    slope = (smooth[0] - smooth[1]) / (freqs[0] - freqs[1])
    offset = smooth[0] - slope * freqs[0]
    if offset >= 0:
        return []
    high = 1 - 1 / offset
    return [(1.0, float(f"{high:.4g}"), round(slope * (high - 1)))]
