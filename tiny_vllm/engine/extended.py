"""The extended engine: paged KV, prefix cache, chunked prefill, shared-prefix attention.

Implements `protocol.Engine` over token ids; with a tokenizer it also produces text.
"""

import gc
import uuid
from collections.abc import Sequence

import numpy as np

from tiny_vllm.config import EngineConfig
from tiny_vllm.core.block_hash import pack_tokens
from tiny_vllm.core.scheduler import Scheduler
from tiny_vllm.engine.engine_core import EngineCore
from tiny_vllm.engine.interrupts import deferred_interrupts
from tiny_vllm.engine.output_processor import OutputProcessor
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import FinishReason, PinnedPrefix, RequestOutput
from tiny_vllm.protocol import EngineInfo, ModelRunner, StepRecord, TokenLedger
from tiny_vllm.request import Request, RequestId
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import Tokenizer, load_tokenizer
from tiny_vllm.validation import validate_cache_key, validate_prompt, validate_request
from tiny_vllm.worker.builder import build_worker


class ExtendedEngine:
    """Requests in, outputs step by step. Not thread-safe; two of them may share a process."""

    def __init__(
        self,
        info: EngineInfo,
        config: EngineConfig,
        runner: ModelRunner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.info = info
        self.config = config
        self.tokenizer = tokenizer
        self._core = EngineCore(Scheduler(config), runner)
        self._outputs = OutputProcessor(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def build(cls, config: EngineConfig) -> "ExtendedEngine":
        """Load the model and size the cache.

        Raises:
            ModelLoadError, ConfigError: nothing is left behind then.
        """
        worker = build_worker(config)
        tokenizer = None
        if not config.skip_tokenizer_init and (config.tokenizer or worker.files.has_tokenizer):
            tokenizer = load_tokenizer(worker.files, config.tokenizer)
        eos = set(worker.eos_token_ids)
        if tokenizer is not None:
            eos.update(tokenizer.eos_token_ids)
        engine = cls(worker.info, worker.config, worker.runner, tokenizer, sorted(eos))
        gc.collect()
        gc.freeze()  # the blocks of a large pool: no collection in a step walks them again
        return engine

    @property
    def ledger(self) -> TokenLedger:
        return self._core.scheduler.ledger

    @property
    def last_step(self) -> StepRecord | None:
        return self._core.last_step

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            cache_salt: a request shares cached KV only with requests of the same salt.
            adapter: names the weights that the KV belongs to, and keeps it apart likewise. All
                requests run on the engine's own weights.

        Raises:
            InvalidRequestError: names the field, the value and the bound; the engine and
                its other requests are as before.
        """
        self._core.check_alive()
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n}: a core request has one completion", "n")
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", "stop")
        validate_cache_key("cache_salt", cache_salt)
        validate_cache_key("adapter", adapter)
        packed, highest = _pack(prompt_token_ids)
        max_tokens = validate_request(
            prompt_token_ids, params, self.info.vocab_size, self.info.max_model_len, highest
        )
        request = Request(
            request_id=RequestId(request_id),
            prompt_token_ids=list(prompt_token_ids),
            packed_prompt=packed,
            params=params,
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            cache_salt=cache_salt,
            adapter=adapter,
            # Their log-probabilities need every prompt position to be computed.
            use_prefix_cache=params.prompt_logprobs is None,
        )
        self._core.scheduler.add_request(request)
        self._outputs.add(request, prompt)

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests that changed.

        An interrupt (Ctrl-C) is raised after the step, so that no request is left half
        done; a second one stops the engine at once.
        """
        with deferred_interrupts():
            results, stops = self._outputs.process(self._core.step())
            for hit in stops:
                self._core.scheduler.finish_request(hit.request_id, FinishReason.STOP, hit.stop)
            return results

    def has_unfinished_requests(self) -> bool:
        return self._core.scheduler.has_unfinished_requests()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Finish a request now with reason `abort`; None when it is unknown or finished."""
        output = self._core.scheduler.finish_request(RequestId(request_id), FinishReason.ABORT)
        if output is None:
            return None
        results, _ = self._outputs.process([output])
        return results[0] if results else None

    def pin_prefix(
        self,
        prompt_token_ids: Sequence[int],
        ttl: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PinnedPrefix:
        """Keep the full blocks of a prompt that are cached now from eviction.

        Args:
            ttl: seconds until the pin is dropped; None keeps it until `unpin`.

        Raises:
            InvalidRequestError: bad values, or more pinned blocks than ``max_pinned_share``
                of the cache; names both numbers.
        """
        self._core.check_alive()
        validate_cache_key("cache_salt", cache_salt)
        validate_cache_key("adapter", adapter)
        validate_prompt(prompt_token_ids, self.info.vocab_size)
        if ttl is not None and (type(ttl) not in (int, float) or not 0 < ttl < float("inf")):
            raise InvalidRequestError(f"ttl={ttl!r} must be a number of seconds above 0", "ttl")
        request = Request(
            RequestId(f"pin {uuid.uuid4().hex}"),  # state is kept by id: none that is in use
            list(prompt_token_ids),
            SamplingParams(),
            1,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        pin = self._core.scheduler.pin(request, ttl)
        return PinnedPrefix(pin.pin_id, pin.num_tokens, len(pin.blocks))

    def unpin(self, pin_id: int) -> bool:
        """Let go of a pin; False when it is unknown, over, or had to yield to a request."""
        return self._core.scheduler.unpin(pin_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, pinned ones too; False when requests still hold blocks."""
        return self._core.scheduler.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Check the block pool and the ledger; raises AssertionError."""
        self._core.scheduler.check_invariants()

    def shutdown(self) -> None:
        """Refuse further work."""
        self._core.kill("it was shut down")


def _pack(token_ids: Sequence[int]) -> tuple[bytes | None, int | None]:
    """A prompt as the prefix cache hashes it, and its highest id; None for a bad prompt.

    The costs of a long prompt's arrival, paid once and at C speed.
    """
    try:
        packed = pack_tokens(token_ids)
    except InvalidRequestError:  # the check of the request says what is wrong, and where
        return None, None
    if not packed:
        return None, None
    return packed, int(np.frombuffer(packed, "<u4").max())
