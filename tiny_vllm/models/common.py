"""What the config files of all families share."""

from collections.abc import Mapping
from typing import Any

from tiny_vllm.config import ModelConfig, RopeScaling
from tiny_vllm.errors import ModelLoadError


def rope_settings(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) from ``rope_theta``/``rope_scaling`` or ``rope_parameters``.

    Raises:
        ModelLoadError: a kind of scaling that is not implemented.
    """
    params = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    theta = float(hf.get("rope_theta") or params.get("rope_theta") or 10000.0)
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelLoadError(f"rope scaling {kind!r} is not supported: only linear and llama3 are")
    return theta, RopeScaling(
        kind=kind,
        factor=float(params["factor"]),
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(params.get("original_max_position_embeddings", 8192)),
    )


def base_config(hf: Mapping[str, Any], **family: Any) -> ModelConfig:
    """Fill the fields that mean the same in every family; ``family`` overrides.

    Raises:
        ModelLoadError: head counts that do not divide, or another activation than SiLU.
    """
    heads = int(hf["num_attention_heads"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act={activation!r} is not supported: only silu is")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelLoadError(
            f"num_attention_heads={heads} is not a positive multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    theta, scaling = rope_settings(hf)
    values: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": int(hf["hidden_size"]),
        "intermediate_size": int(hf["intermediate_size"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": int(hf.get("max_position_embeddings", 2048)),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "bos_token_id": _first(hf.get("bos_token_id")),
        "eos_token_ids": _as_tuple(hf.get("eos_token_id")),
        "dtype": str(hf.get("torch_dtype") or hf.get("dtype") or "bfloat16").split(".")[-1],
    }
    return ModelConfig(**{**values, **family})


def _as_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _first(value: Any) -> int | None:
    ids = _as_tuple(value)
    return ids[0] if ids else None
