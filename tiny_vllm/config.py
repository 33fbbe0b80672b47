"""Frozen configuration. Unknown keys raise with the nearest match; `resolve` makes each
"auto" concrete and records why. Stdlib only.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiny_vllm.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
POSITIVE_SETTINGS = (
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_threads",
)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SWITCHES = (
    "enable_prefix_caching",
    "enable_partial_block_reuse",
    "enable_chunked_prefill",
    "use_cuda_graph",
    "async_scheduling",
    "debug_checks",
    "skip_tokenizer_init",
)
LARGE_GPU = 64 << 30  # bytes
MAX_HEAD_DIM = 256  # of the Triton attention kernel
MAX_GROUP = 128  # query heads of a KV head, likewise
MAX_THREADS = 1024  # far more would end the process inside the thread library
_T = TypeVar("_T")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``; names the nearest."""
    options = list(choices)
    if value not in options:
        near = difflib.get_close_matches(str(value), [str(o) for o in options], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, options))}{hint}")


def from_mapping(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """Build a config dataclass from keywords; an unknown key names its nearest match."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [f.name for f in fields if f.init and f.name != "reasons"]
    for key in values:
        if key not in names and key != "reasons":
            near = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"unknown {cls.__name__} key {key!r}{hint}")
    return cls(**values)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: none, `linear`, or `llama3` (Llama 3.1 paper)."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a dense decoder; the flags cover the supported families.

    Attributes:
        sliding_window: tokens a query may look back (itself included), None = all.
        num_full_attention_layers: the first layers that ignore ``sliding_window``
            (Qwen2's ``max_window_layers``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    num_full_attention_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # the checkpoint's own

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of a layer, None for full attention."""
        return None if layer < self.num_full_attention_layers else self.sliding_window

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the extended engine. Fields named as in vLLM mean the same thing.

    None or "auto" is made concrete by `resolve`; ``reasons`` then says why.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool = True
    enable_partial_block_reuse: bool = True
    enable_chunked_prefill: bool = True
    use_cuda_graph: bool = True
    attention: str = "forest"
    attention_backend: str = "auto"
    async_scheduling: bool = True
    schedule: str = "fcfs"
    max_held_steps: int = 64
    max_pinned_share: float = 0.5
    seed: int = 0
    num_threads: int | None = None
    debug_checks: bool = False
    skip_tokenizer_init: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("load_format", self.load_format, ("auto", "dummy", "safetensors", "gguf"))
        check_choice("dtype", self.dtype, DTYPES)
        _check_device(self.device)
        check_choice("attention", self.attention, ("forest", "per-request"))
        check_choice("attention_backend", self.attention_backend, ("auto", "torch", "triton"))
        check_choice("schedule", self.schedule, ("fcfs", "prefix"))
        for name in POSITIVE_SETTINGS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number >= 1")
        _check_scalars(self)

    @classmethod
    def create(cls, **values: Any) -> "EngineConfig":
        """Build from keywords, refusing unknown ones by name."""
        return from_mapping(cls, values)

    def replace(self, **changes: Any) -> "EngineConfig":
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the reasons."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values.pop("reasons")
        return values


def _check_device(device: object) -> None:
    name, colon, index = device.partition(":") if isinstance(device, str) else (device, "", "")
    check_choice("device", name, ("auto", "cpu", "cuda"))
    if colon and not (name == "cuda" and index.isascii() and index.isdecimal()):
        raise ConfigError(f"device={device!r} cannot be used: give auto, cpu, cuda or cuda:N")


def _check_scalars(config: EngineConfig) -> None:
    share = config.gpu_memory_utilization
    if type(share) not in (int, float) or not 0.05 <= share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization={share!r} must be a number in [0.05, 1.0]")
    pinned = config.max_pinned_share
    if type(pinned) not in (int, float) or not 0.0 <= pinned <= 0.9:
        raise ConfigError(f"max_pinned_share={pinned!r} must be a number in [0.0, 0.9]")
    if type(config.seed) is not int:
        raise ConfigError(f"seed={config.seed!r} must be a whole number")
    if type(config.max_held_steps) is not int or config.max_held_steps < 0:
        raise ConfigError(f"max_held_steps={config.max_held_steps!r} must be a whole number >= 0")
    if config.num_threads is not None and config.num_threads > MAX_THREADS:
        raise ConfigError(f"num_threads={config.num_threads} must be at most {MAX_THREADS}")
    for name in SWITCHES:
        if type(getattr(config, name)) is not bool:
            raise ConfigError(f"{name}={getattr(config, name)!r} must be True or False")
    for name in ("model", "tokenizer", "revision"):
        value = getattr(config, name)
        if not isinstance(value, str) and (name == "model" or value is not None):
            raise ConfigError(f"{name}={value!r} must be text")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What `resolve` needs to know of the machine; gathered by the worker."""

    has_cuda: bool = False
    cuda_reason: str = "no CUDA device"
    triton_fault: str | None = "no CUDA device"  # why Triton kernels cannot run; None if they can
    gpu_memory_bytes: int = 0
    num_gpus: int = 1  # that torch sees, if any
    cpu_bf16: bool = False  # matrix products in bf16 are native (AVX512-BF16, AMX)
    num_cores: int = 1
    available_memory_bytes: int = 4 << 30


def resolve(config: EngineConfig, model: ModelConfig, host: HostFacts) -> EngineConfig:
    """Make every automatic setting concrete and record the reason of each.

    The number of blocks on a GPU stays None: the worker measures it after loading.

    Raises:
        ConfigError: a combination that cannot work, with both numbers.
    """
    out: dict[str, Any] = {}
    why: dict[str, str] = {}

    def pick(name: str, value: Any, reason: str) -> Any:
        out[name], why[name] = value, reason
        return value

    def given(name: str) -> bool:
        value = getattr(config, name)
        if value is None or value == "auto":
            return False
        pick(name, value, "set by the user")
        return True

    _resolve_device(config, host, pick, given)
    is_cpu = out["device"] == "cpu"
    _resolve_dtype(model, host, is_cpu, pick, given)
    _resolve_lengths(config, model, host, is_cpu, out, pick, given)
    if not given("num_threads"):
        pick("num_threads", host.num_cores, "OMP_NUM_THREADS, else all cores this process may use")
    _resolve_backend(config, model, host, is_cpu, pick, given)
    has_loop = out["attention_backend"] == "triton"
    for name in ("use_cuda_graph", "async_scheduling"):
        if getattr(config, name) and not has_loop:
            where = "on cpu" if is_cpu else "without the Triton backend"
            pick(name, False, f"no effect {where}: it needs the decode loop of a GPU")
    if is_cpu:
        _resolve_cpu_blocks(config, model, host, out, pick, given)
    return config.replace(**out, reasons=why)


def _resolve_device(config: EngineConfig, host: HostFacts, pick: Any, given: Any) -> None:
    if given("device"):
        if config.device.startswith("cuda") and not host.has_cuda:
            raise ConfigError(
                f"device={config.device!r} cannot be used: {host.cuda_reason}; use --device cpu"
            )
        _, _, index = config.device.partition(":")
        if index and int(index) >= host.num_gpus:
            raise ConfigError(
                f"device={config.device!r} cannot be used: this machine has {host.num_gpus} "
                f"GPU(s), cuda:0 to cuda:{host.num_gpus - 1}"
            )
    elif host.has_cuda:
        pick("device", "cuda", "a CUDA device is usable")
    else:
        pick("device", "cpu", host.cuda_reason)


def _resolve_backend(
    config: EngineConfig, model: ModelConfig, host: HostFacts, is_cpu: bool, pick: Any, given: Any
) -> None:
    fault = "kernels run on a GPU only" if is_cpu else host.triton_fault
    if fault is None and (model.head_dim > MAX_HEAD_DIM or model.head_dim % 2):
        fault = f"head_dim={model.head_dim}: the kernels take even sizes up to {MAX_HEAD_DIM}"
    if fault is None and model.num_heads > MAX_GROUP * model.num_kv_heads:
        fault = (
            f"more than {MAX_GROUP} query heads share a KV head: no tile of the kernels holds them"
        )
    if given("attention_backend"):
        if config.attention_backend == "triton" and fault is not None:
            raise ConfigError(
                f"attention_backend='triton' cannot be used: {fault}; use auto or torch"
            )
    elif fault is None:
        pick("attention_backend", "triton", "Triton kernels run on this GPU")
    else:
        pick("attention_backend", "torch", fault)


def _resolve_dtype(
    model: ModelConfig, host: HostFacts, is_cpu: bool, pick: Any, given: Any
) -> None:
    if given("dtype"):
        return
    if is_cpu and not host.cpu_bf16:
        pick("dtype", "float32", "this CPU has no native bf16 matrix product")
    elif is_cpu or model.dtype == "float32":
        pick("dtype", "bfloat16", "half the bytes of float32, native on this device")
    else:
        pick("dtype", model.dtype, "the checkpoint's own")


def _resolve_lengths(
    config: EngineConfig,
    model: ModelConfig,
    host: HostFacts,
    is_cpu: bool,
    out: Any,
    pick: Any,
    given: Any,
) -> None:
    limit = model.max_position_embeddings
    if not given("max_model_len"):
        pick("max_model_len", limit, "the model's max_position_embeddings")
    elif config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's "
            f"max_position_embeddings={limit}; lower it"
        )
    if not given("block_size"):
        pick("block_size", 32 if is_cpu else 64, "measured default of this device")
    if not given("max_num_seqs"):
        pick("max_num_seqs", 64 if is_cpu else 256, "default of this device")
    max_len = out["max_model_len"]
    if not given("max_num_batched_tokens"):
        budget, reason = (1024, "measured default on cpu") if is_cpu else (8192, "default on cuda")
        if not is_cpu and host.gpu_memory_bytes >= LARGE_GPU:
            budget, reason = 16384, f"default of a GPU with {LARGE_GPU >> 30} GiB or more"
        if not config.enable_chunked_prefill and budget < max_len:
            budget, reason = max_len, "whole prompts must fit a step without chunked prefill"
        pick("max_num_batched_tokens", budget, reason)
    elif not config.enable_chunked_prefill and out["max_num_batched_tokens"] < max_len:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is below "
            f"max_model_len={max_len}; without chunked prefill a whole prompt must fit one step"
        )


def _resolve_cpu_blocks(
    config: EngineConfig, model: ModelConfig, host: HostFacts, out: Any, pick: Any, given: Any
) -> None:
    block_bytes = model.kv_bytes_per_token(out["dtype"]) * out["block_size"]
    if given("num_blocks"):
        _check_cpu_pool("num_blocks", out["num_blocks"], out["num_blocks"] * block_bytes, host)
        return
    if given("kv_cache_memory_bytes"):
        budget = out["kv_cache_memory_bytes"]
        _check_cpu_pool("kv_cache_memory_bytes", budget, budget, host)
    else:
        one_request = block_bytes * -(-out["max_model_len"] // out["block_size"])
        budget = min(max(1 << 30, one_request), host.available_memory_bytes // 4)
        reason = "1 GiB or one request of max_model_len, at most a quarter of the free memory"
        pick("kv_cache_memory_bytes", budget, reason)
    if budget < block_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget} holds no block: one block of {out['block_size']} "
            f"tokens needs {block_bytes} bytes; raise it or lower block_size"
        )
    pick("num_blocks", budget // block_bytes, f"kv_cache_memory_bytes / {block_bytes} per block")


def _check_cpu_pool(name: str, value: int, size: int, host: HostFacts) -> None:
    """The pool is mapped when it is written: one too large would end the process much later."""
    if size > host.available_memory_bytes:
        raise ConfigError(
            f"{name}={value} asks for a KV cache of {size} bytes, "
            f"{host.available_memory_bytes} bytes of memory are free; lower it"
        )
