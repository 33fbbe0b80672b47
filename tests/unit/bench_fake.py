"""A small engine without a model, for tests of `bench`: next token = f(prompt, position).

One prefill or one decode step for all running requests, as a baseline would; counts its
tokens in a ledger; with `enable_prefix_caching` the longest earlier common prefix is free.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import ConfigError, InvalidRequestError
from tiny_vllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from tiny_vllm.protocol import EngineInfo, KvBytes, StepRecord, TokenLedger
from tiny_vllm.sampling_params import SamplingParams

VOCAB = 1000


def make_info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "name": "fake",
        "device": "cpu",
        "dtype": "float32",
        "config": {"max_num_seqs": 4, "num_threads": 1},
        "reasons": {"device": "a test", "max_model_len": "set by the user"},
        "num_parameters": 100,
        "weight_bytes": 400,
        "kv_bytes_per_token": 8,
        "linear_flops_per_token": 100,
        "lm_head_flops_per_token": 50,
        "attention_flops_per_context_token": 2,
        "vocab_size": VOCAB,
        "max_model_len": 512,
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]


class FakeEngine:
    """Implements `protocol.Engine`. ``flip_at`` changes the token at that position."""

    flip_at: int | None = None

    def __init__(
        self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.info = make_info(
            config=config.to_dict() | {"num_threads": 1}, max_model_len=config.max_model_len or 512
        )
        self.ledger = TokenLedger()
        self.last_step: StepRecord | None = None
        self.clock = clock
        self.caching = config.enable_prefix_caching
        self.seen: list[list[int]] = []
        self.resets = 0
        self._waiting: list[tuple[RequestOutput, SamplingParams]] = []
        self._running: list[tuple[RequestOutput, SamplingParams]] = []
        self._steps = 0

    @classmethod
    def build(cls, config: EngineConfig) -> "FakeEngine":
        return cls(config)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        metrics = RequestMetrics(arrival_time=self.clock())
        prompt = list(prompt_token_ids)
        output = RequestOutput(request_id, None, prompt, [CompletionOutput(0)], metrics=metrics)
        self._waiting.append((output, params))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[RequestOutput]:
        start = self.clock()
        slots = 4 - len(self._running)
        fresh, self._waiting = self._waiting[:slots], self._waiting[slots:]
        batch = fresh or list(self._running)
        prefill = sum(self._admit(output) for output, _ in fresh)
        self._running += fresh
        now = self.clock()
        for output, params in batch:
            self._append(output, params, now)
        self._running = [pair for pair in self._running if not pair[0].finished]
        decode = 0 if fresh else len(batch)
        self.ledger.decoded_tokens += decode
        self.ledger.forward_tokens += prefill + decode
        self._steps += 1
        self.last_step = StepRecord(
            self._steps, start, now, decode, prefill, len(batch), len(batch), len(self._waiting),
            kv_bytes=KvBytes(16, 8), attention_context_tokens=10, num_logit_rows=len(batch),
        )  # fmt: skip
        return [output for output, _ in batch]

    def _admit(self, output: RequestOutput) -> int:
        """Prompt tokens to compute."""
        prompt = output.prompt_token_ids
        common = [_common(prompt, other) for other in self.seen] if self.caching else []
        cached = min(max(common, default=0), len(prompt) - 1)
        self.seen.append(prompt)
        output.num_cached_tokens = cached
        self.ledger.prompt_tokens += len(prompt)
        self.ledger.cached_tokens += cached
        self.ledger.computed_tokens += len(prompt) - cached
        self.ledger.missed_cold += len(prompt) - cached
        self.ledger.blocks_asked += len(prompt) // 16 if self.caching else 0
        self.ledger.blocks_found += cached // 16 if self.caching else 0
        return len(prompt) - cached

    def _append(self, output: RequestOutput, params: SamplingParams, now: float) -> None:
        completion = output.outputs[0]
        position = len(completion.token_ids)
        token = (sum(output.prompt_token_ids) + 7 * position) % VOCAB
        completion.token_ids.append(token + (position == self.flip_at))
        assert output.metrics is not None
        output.metrics.token_times.append(now)
        if len(completion.token_ids) == params.max_tokens:
            completion.finish_reason, output.finished = FinishReason.LENGTH, True

    def abort(self, request_id: str) -> None:
        raise NotImplementedError("the benchmark aborts nothing")

    def reset_prefix_cache(self) -> bool:
        self.seen.clear()
        self.resets += 1
        return True

    def shutdown(self) -> None:
        self._running.clear()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class FlippedEngine(FakeEngine):
    """Differs from `FakeEngine` in the third token of every output."""

    flip_at = 2


class PickyEngine(FakeEngine):
    """Takes nothing but the warm-up."""

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        if self.resets:
            raise InvalidRequestError(f"request {request_id} is not to my taste")
        super().add_request(request_id, prompt_token_ids, params)


class RefusingEngine(FakeEngine):
    """Cannot be built."""

    @classmethod
    def build(cls, config: EngineConfig) -> "FakeEngine":
        raise ConfigError(f"block_size={config.block_size} is no good")


class KilledEngine(FakeEngine):
    """Dies in its first step, as a process without memory does."""

    def step(self) -> list[RequestOutput]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


class BrokenEngine(FakeEngine):
    """Raises in the middle of a run, after the warm-up."""

    def step(self) -> list[RequestOutput]:
        if self.resets:
            raise ArithmeticError("the numbers went wrong")
        return super().step()
