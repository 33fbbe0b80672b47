"""What `bench.kernels` measures: ops, shapes, and the work that none can avoid. No torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tiny_vllm.bench import kernel_work as work_of
from tiny_vllm.config import DTYPE_BYTES, ModelConfig, check_choice

TINY_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A decoding batch: ``documents`` x ``per_document`` requests, lengths in tokens.

    A request holds ``common`` tokens that all share, ``prefix`` of its document, ``own``.
    """

    documents: int
    per_document: int
    common: int
    prefix: int
    own: int

    @property
    def batch(self) -> int:
        return self.documents * self.per_document

    @property
    def context(self) -> int:
        return self.common + self.prefix + self.own

    @property
    def unique_tokens(self) -> int:
        return self.common + self.documents * self.prefix + self.batch * self.own

    @property
    def label(self) -> str:
        lengths = f"{_tokens(self.prefix)} + {self.own}"
        if self.documents == 1:
            return f"{self.batch} x {lengths}"
        return f"{self.documents} x {self.per_document} on {_tokens(self.common)} + {lengths}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are.

    Attributes:
        few_rows: decoding rows; many_rows: rows of larger steps, for element-wise ops alone.
        chunks: query tokens of a prefill.
    """

    few_rows: tuple[int, ...]
    many_rows: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    decodes: tuple[Traffic, ...]
    chunks: tuple[int, ...]
    block_size: int


FULL = Sizes(
    few_rows=(1, 2, 4, 8, 16),
    many_rows=(256, 8192),
    sampled_rows=(1, 32, 256),
    decodes=(
        *(
            Traffic(1, batch, 0, prefix << 10, 256)
            for batch, prefix in ((1, 1), (8, 8), (32, 8), (128, 8), (32, 32), (128, 32))
        ),
        Traffic(8, 16, 1024, 8192, 256),
    ),
    chunks=(2048, 8192),
    block_size=64,
)
TINY = Sizes(
    (1, 3), (20,), (1, 3), (Traffic(1, 2, 0, 128, 5), Traffic(2, 2, 64, 128, 5)), (40,), 16
)


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        rows: rows, or query tokens, of a call.
        num_bytes, flops: what one call cannot avoid.
        traffic: of decode attention.
    """

    op: str
    label: str
    rows: int
    num_bytes: int
    flops: int
    block_size: int = 64
    traffic: Traffic | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"


@dataclass(frozen=True, slots=True)
class Op:
    """An op: what it does, the function that prepares it, and its work at ``rows`` rows."""

    about: str
    builder: str  # module:function, imported when the op is run
    work: Callable[[ModelConfig, int, int], tuple[int, int]] = field(
        default=lambda config, rows, size: (0, 0)
    )


_LAYERS = "tiny_vllm.bench.kernel_layers"
_SAMPLERS = "tiny_vllm.bench.kernel_samplers"
_FOREST = "tiny_vllm.bench.kernel_forest"
OPS: Mapping[str, Op] = {
    "rms_norm": Op("root-mean-square norm", f"{_LAYERS}:rms_norm_case", work_of.rms_norm),
    "silu_mul": Op("gate of the feed-forward layer", f"{_LAYERS}:silu_mul_case", work_of.silu_mul),
    "rotary_store": Op(
        "rotation of q and k, k and v to the cache",
        f"{_LAYERS}:rotary_store_case",
        work_of.rotary_store,
    ),
    "norm_linear": Op("norm + qkv product", f"{_LAYERS}:norm_linear_case", work_of.norm_linear),
    "norm_gated": Op(
        "norm + gate and up + gating", f"{_LAYERS}:norm_gated_case", work_of.norm_gated
    ),
    "linear_add_out": Op("output product + residual", f"{_LAYERS}:add_out_case", work_of.add_out),
    "linear_add_down": Op("down product + residual", f"{_LAYERS}:add_down_case", work_of.add_down),
    "norm_lm_head": Op("norm + logits in float32", f"{_LAYERS}:lm_head_case", work_of.norm_lm_head),
    "greedy": Op("arg-max of float32 logits", f"{_SAMPLERS}:greedy_case", work_of.sample(1)),
    "gumbel": Op("a draw from float32 logits", f"{_SAMPLERS}:gumbel_case", work_of.sample(5)),
    "gumbel_filtered": Op(
        "the same with top-k and top-p", f"{_SAMPLERS}:filtered_case", work_of.sample(7)
    ),
    "decode_attention": Op("one layer, forest against per request", f"{_FOREST}:decode_case"),
    "prefill_attention": Op("one layer of a cold chunk, causal", f"{_FOREST}:prefill_case"),
}
_ELEMENTWISE = ("rms_norm", "silu_mul", "rotary_store")
_SAMPLING = ("greedy", "gumbel", "gumbel_filtered")


def select_ops(only: Iterable[str]) -> tuple[str, ...]:
    """Ops whose name is, or contains, one of ``only``; all of them when it is empty.

    Raises:
        ConfigError: a name that fits no op.
    """
    wanted = tuple(only)
    for name in wanted:
        if not name or not any(name in op for op in OPS):
            check_choice("--only", name, OPS)
    return tuple(op for op in OPS if not wanted or any(name in op for name in wanted))


def make_cases(config: ModelConfig, dtype: str, sizes: Sizes, ops: Iterable[str]) -> list[Case]:
    """The cases of ``ops``, in their order, with their work."""
    size = DTYPE_BYTES[dtype]
    return [case for op in ops for case in _cases_of(op, config, size, sizes)]


def _cases_of(op: str, config: ModelConfig, size: int, sizes: Sizes) -> list[Case]:
    if op == "decode_attention":
        return [_decode(config, size, traffic, sizes.block_size) for traffic in sizes.decodes]
    if op == "prefill_attention":
        return [_prefill(config, size, tokens, sizes.block_size) for tokens in sizes.chunks]
    rows = sizes.sampled_rows if op in _SAMPLING else sizes.few_rows
    rows += sizes.many_rows if op in _ELEMENTWISE else ()
    work = OPS[op].work
    block = sizes.block_size
    return [Case(op, f"{n} row{'s'[: n > 1]}", n, *work(config, n, size), block) for n in rows]


def _decode(c: ModelConfig, size: int, traffic: Traffic, block_size: int) -> Case:
    lengths = traffic.batch, traffic.context, traffic.unique_tokens
    work = work_of.decode_attention(c, *lengths, size)
    return Case("decode_attention", traffic.label, traffic.batch, *work, block_size, traffic)


def _prefill(c: ModelConfig, size: int, tokens: int, block_size: int) -> Case:
    work = work_of.prefill_attention(c, tokens, size)
    return Case("prefill_attention", f"{_tokens(tokens)} tokens", tokens, *work, block_size)


def _tokens(count: int) -> str:
    return f"{count >> 10}k" if count and count % 1024 == 0 else str(count)
