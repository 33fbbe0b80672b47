"""Sizing of the KV pool on a device whose memory is measured after loading."""

import torch
from torch import Tensor

from tiny_vllm.errors import ConfigError
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.ops.rotary import RotaryEmbedding

_UNFUSED_RESERVE = 1 << 30  # activations and library workspaces of the torch backend
_GRAPH_RESERVE = 512 << 20  # CUDA graphs, their workspaces, fragmentation


def size_kv_pool(loaded: LoadedModel) -> None:
    """Fill ``num_blocks`` of a resolved config from free GPU memory; no-op when set.

    What the longest step and the largest decode batch need is measured or known, and set
    aside first, so that no request runs out of memory later.

    Raises:
        ConfigError: not even one block fits; names the settings to change.
    """
    config = loaded.config
    assert config.block_size is not None
    block_bytes = loaded.model_config.kv_bytes_per_token(config.dtype) * config.block_size
    if config.num_blocks is not None:
        if loaded.device.type == "cuda":
            _check_free(loaded, "num_blocks", config.num_blocks, config.num_blocks * block_bytes)
        return
    budget = config.kv_cache_memory_bytes
    reason = "kv_cache_memory_bytes"
    if budget is not None:
        _check_free(loaded, reason, budget, budget)
    if budget is None:
        reserve = _reserve(loaded)
        free, total = torch.cuda.mem_get_info(loaded.device)
        budget = int(config.gpu_memory_utilization * total) - (total - free) - reserve
        reason = (
            f"{free} bytes free of {total}, gpu_memory_utilization, "
            f"less {reserve} for the longest step and CUDA graphs"
        )
    if budget < block_bytes:
        raise ConfigError(
            f"no KV block fits: {budget} bytes are left for the pool, a block needs "
            f"{block_bytes}; raise gpu_memory_utilization={config.gpu_memory_utilization}, or "
            f"lower max_num_batched_tokens={config.max_num_batched_tokens}, "
            f"max_num_seqs={config.max_num_seqs} or block_size={config.block_size}"
        )
    reasons = {**config.reasons, "num_blocks": f"{reason} / {block_bytes} bytes a block"}
    loaded.config = config.replace(num_blocks=budget // block_bytes, reasons=reasons)


def _check_free(loaded: LoadedModel, name: str, value: int, size: int) -> None:
    free, _ = torch.cuda.mem_get_info(loaded.device)
    if size > free:
        raise ConfigError(
            f"{name}={value} asks for a KV cache of {size} bytes, {free} bytes of GPU memory "
            "are free; lower it"
        )


def _reserve(loaded: LoadedModel) -> int:
    """Bytes to leave free beside the pool."""
    config, model = loaded.config, loaded.model_config
    if config.attention_backend != "triton":
        return _UNFUSED_RESERVE
    from tiny_vllm.attention.triton_backend import working_bytes

    assert config.max_num_batched_tokens is not None and config.max_num_seqs is not None
    logits = 2 * 4 * config.max_num_seqs * model.vocab_size
    working = working_bytes(model, config.max_num_batched_tokens)
    return _peak_of_step(loaded) + working + logits + _GRAPH_RESERVE


class _NoAttention:
    """Stands in for attention while the memory of the other layers is measured."""

    def __init__(self, width: int, positions: Tensor) -> None:
        self._width, self.positions = width, positions

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotary: RotaryEmbedding,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        return qkv.new_zeros((2, len(qkv), self._width))[0]  # rotated queries and the result


def _peak_of_step(loaded: LoadedModel) -> int:
    """Bytes that a step of ``max_num_batched_tokens`` allocates at its peak, measured.

    Raises:
        ConfigError: it does not fit; names the settings to change.
    """
    config, device = loaded.config, loaded.device
    count = config.max_num_batched_tokens
    assert count is not None
    width = loaded.model_config.num_heads * loaded.model_config.head_dim
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        loaded.decoder.forward_fused(tokens, tokens, _NoAttention(width, tokens))
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of max_num_batched_tokens={count} tokens runs out of GPU memory; lower it"
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    del tokens
    torch.cuda.empty_cache()
    return peak
