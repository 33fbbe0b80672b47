"""The baseline engine: the plain one a good engineer writes first.

Static slots refilled when free, a whole prompt per prefill step, then one token for every
occupied slot per decode step. No prefix reuse, no chunks, no sharing, no graphs; the same
model, weights, linears and sampler as the extended engine. A step is a prefill whenever a
slot is free and a request waits, else a decode. Occupied slots are 0..n-1 in a decode.
"""

import time
from collections import deque
from collections.abc import Sequence

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import EngineDeadError, InvalidRequestError
from tiny_vllm.models.loader import LoadedModel, engine_info, load_model
from tiny_vllm.origin.kv_cache import plan_slots
from tiny_vllm.origin.request import OriginRequest, RequestFactory
from tiny_vllm.origin.runner import SlotRunner, SlotStep
from tiny_vllm.origin.text import TextFactory
from tiny_vllm.outputs import FinishReason, RequestOutput
from tiny_vllm.protocol import SampledToken, StepRecord, TokenLedger
from tiny_vllm.sampling_params import SamplingParams


class OriginEngine:
    """Implements `protocol.Engine`.

    Args:
        loaded: the model, with ``config.max_num_seqs`` slots to allocate.
        texts: makes the detokenizer of a request; without one, stop strings are refused.
    """

    def __init__(self, loaded: LoadedModel, texts: TextFactory | None = None) -> None:
        assert loaded.config.max_num_seqs is not None
        texts = texts or TextFactory()
        self.info = engine_info("origin", loaded)
        self.ledger = TokenLedger()
        self.last_step: StepRecord | None = None
        self._factory = RequestFactory(
            self.info,
            frozenset(loaded.model_config.eos_token_ids) | frozenset(texts.eos_token_ids),
            loaded.config.seed,
            texts,
        )
        self._requests: dict[str, OriginRequest] = {}  # unfinished
        self._runner: SlotRunner | None = SlotRunner(loaded, loaded.config.max_num_seqs)
        self._slots: list[OriginRequest | None] = [None] * loaded.config.max_num_seqs
        self._waiting: deque[OriginRequest] = deque()
        self._num_steps = 0

    @classmethod
    def build(cls, config: EngineConfig) -> "OriginEngine":
        """Load the model and allocate the slots.

        Raises:
            ModelLoadError: the model cannot be found or read.
            ConfigError: the settings cannot work, or the slots do not fit the memory.
        """
        loaded = load_model(config)
        num_slots, reason = plan_slots(config, loaded)
        loaded.config = _baseline_config(loaded.config, num_slots, reason)
        return cls(loaded, TextFactory.load(loaded))

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: a value that cannot work, or an id that is in use.
            EngineDeadError: after `shutdown`.
        """
        self._alive()
        if request_id in self._requests:
            raise InvalidRequestError(
                f"request_id={request_id!r} is in use; give each request its own", "request_id"
            )
        request = self._factory.make(request_id, prompt_token_ids, params)
        self._requests[request_id] = request
        self._waiting.append(request)

    def has_unfinished_requests(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._requests)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Finish a request now with reason `abort`; None when it is unknown or finished.

        `step` says nothing more about it.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish(FinishReason.ABORT, time.perf_counter())
        if request in self._slots:
            self._slots[self._slots.index(request)] = None
        else:
            self._waiting.remove(request)
        return request.snapshot()

    def _release_finished(self) -> None:
        for slot, request in enumerate(self._slots):
            if request is not None and request.finished:
                self._slots[slot] = None
                del self._requests[request.request_id]

    def reset_prefix_cache(self) -> bool:
        """Nothing is kept from one request to the next: always True."""
        return True

    def shutdown(self) -> None:
        """Drop the requests, the model and the KV memory; may be called twice."""
        self._runner = None
        self._slots = []
        self._waiting.clear()
        self._requests.clear()

    def _alive(self) -> SlotRunner:
        if self._runner is None:
            raise EngineDeadError("the engine was shut down; build a new one")
        return self._runner

    def step(self) -> list[RequestOutput]:
        """Run one prefill or one decode; return the requests that changed.

        Raises:
            EngineDeadError: after `shutdown`.
        """
        runner = self._alive()
        if not self._requests:
            return []
        refill = bool(self._waiting) and None in self._slots
        outputs = self._prefill(runner) if refill else self._decode(runner)
        self._release_finished()
        return outputs

    def _prefill(self, runner: SlotRunner) -> list[RequestOutput]:
        start = time.perf_counter()
        request, slot = self._waiting.popleft(), self._slots.index(None)
        self._slots[slot] = request
        request.metrics.first_scheduled_time = start
        num_tokens = len(request.prompt_token_ids)
        result = runner.prefill(slot, request.row)
        request.add_prompt_logprobs(result.prompt_logprobs)
        self.ledger.prompt_tokens += num_tokens
        self.ledger.computed_tokens += num_tokens
        self.ledger.missed_disabled += num_tokens
        return self._finish_step(start, [request], result, num_prefill=num_tokens)

    def _decode(self, runner: SlotRunner) -> list[RequestOutput]:
        start = time.perf_counter()
        self._close_gaps(runner)
        requests = [request for request in self._slots if request]
        result = runner.decode([request.row for request in requests])
        self.ledger.decoded_tokens += len(requests)
        return self._finish_step(start, requests, result, num_decode=len(requests))

    def _close_gaps(self, runner: SlotRunner) -> None:
        """Move the last requests into free slots, so that one view covers all of them.

        Only when nothing waits: else the slot is refilled before the next decode.
        """
        num_occupied = sum(request is not None for request in self._slots)
        for source in range(num_occupied, len(self._slots)):
            request = self._slots[source]
            if request is not None:
                target = self._slots.index(None)
                runner.move(source, target, request.num_tokens - 1)
                self._slots[target], self._slots[source] = request, None

    def _finish_step(
        self,
        start: float,
        requests: Sequence[OriginRequest],
        result: SlotStep,
        num_prefill: int = 0,
        num_decode: int = 0,
    ) -> list[RequestOutput]:
        now = time.perf_counter()
        for request, sampled in zip(requests, result.sampled, strict=True):
            if isinstance(sampled, SampledToken):
                request.append(sampled, now)
            else:
                request.finish(FinishReason.ERROR, now, error=sampled.message)
        self.ledger.forward_tokens += num_prefill + num_decode
        self._num_steps += 1
        self.last_step = StepRecord(
            step=self._num_steps,
            start=start,
            end=now,
            num_decode_tokens=num_decode,
            num_prefill_tokens=num_prefill,
            num_requests=len(requests),
            num_sampled=sum(isinstance(s, SampledToken) for s in result.sampled),
            num_waiting=len(self._waiting),
            kv_bytes=result.kv_bytes,
            attention_context_tokens=result.attention_context_tokens,
            num_logit_rows=result.num_logit_rows,
        )
        return [request.snapshot() for request in requests]


def _baseline_config(config: EngineConfig, num_slots: int, reason: str) -> EngineConfig:
    """The settings as they are used here: what the baseline lacks is off, and says so."""
    settings = {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "use_cuda_graph": False,
        "attention": "per-request",
        "block_size": None,
        "num_blocks": None,
        "max_num_batched_tokens": None,
    }
    reasons = dict.fromkeys(settings, "the baseline has none: contiguous slots, whole prompts")
    reasons = {**config.reasons, **reasons, "max_num_seqs": reason}
    return config.replace(**settings, max_num_seqs=num_slots, reasons=reasons)
