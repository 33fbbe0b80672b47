"""Bytes and FLOPs of the ops that `bench.kernels` measures: (bytes, FLOPs) at some rows.

Bytes are those of one call on a cold cache, each buffer once; those of decode attention are
unique KV bytes, a shared prefix once. FLOPs of products are 2 per multiply-add; element-wise
ops count what their formula writes, a function such as exp as one. ``size`` is bytes a number.
"""

from collections.abc import Callable

from tiny_vllm.config import ModelConfig

FLOAT32_BYTES = 4


def rms_norm(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    return (2 * rows + 1) * c.hidden_size * size, 4 * rows * c.hidden_size


def silu_mul(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    return 3 * rows * c.intermediate_size * size, 5 * rows * c.intermediate_size


def qkv_width(c: ModelConfig) -> int:
    """Output features of the stacked q, k and v projections."""
    return (c.num_heads + 2 * c.num_kv_heads) * c.head_dim


def rotary_store(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    rotated = (c.num_heads + c.num_kv_heads) * c.head_dim
    return rows * 2 * (qkv_width(c) + c.head_dim) * size, 3 * rows * rotated


def _product(
    rows: int, out: int, width: int, size: int, written: int | None = None
) -> tuple[int, int]:
    """Weight, input and ``written`` bytes of output; [rows, width] x [out, width]."""
    written = rows * out * size if written is None else written
    return out * width * size + rows * width * size + written, 2 * rows * out * width


def norm_linear(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    return _product(rows, qkv_width(c), c.hidden_size, size)


def norm_gated(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    written = rows * c.intermediate_size * size
    return _product(rows, 2 * c.intermediate_size, c.hidden_size, size, written)


def add_out(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    written = 2 * rows * c.hidden_size * size  # the residual is read, too
    return _product(rows, c.hidden_size, c.num_heads * c.head_dim, size, written)


def add_down(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    written = 2 * rows * c.hidden_size * size
    return _product(rows, c.hidden_size, c.intermediate_size, size, written)


def norm_lm_head(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
    written = rows * c.vocab_size * FLOAT32_BYTES
    return _product(rows, c.vocab_size, c.hidden_size, size, written)


def sample(flops_each: int) -> Callable[[ModelConfig, int, int], tuple[int, int]]:
    """Work on float32 logits, read once, whatever the dtype of the model."""

    def work(c: ModelConfig, rows: int, size: int) -> tuple[int, int]:
        return rows * c.vocab_size * FLOAT32_BYTES, flops_each * rows * c.vocab_size

    return work


def decode_attention(
    c: ModelConfig, batch: int, context: int, unique_tokens: int, size: int
) -> tuple[int, int]:
    """One layer of a decode step: ``batch`` queries on ``context`` tokens each."""
    num_bytes = unique_tokens * 2 * c.num_kv_heads * c.head_dim * size
    return num_bytes, 4 * c.num_heads * c.head_dim * batch * context


def prefill_attention(c: ModelConfig, tokens: int, size: int) -> tuple[int, int]:
    """One layer of a cold chunk, causal."""
    num_bytes = 2 * tokens * (c.num_heads + c.num_kv_heads) * c.head_dim * size
    return num_bytes, 4 * c.num_heads * c.head_dim * tokens * (tokens + 1) // 2
