"""One step of the engine: schedule, run, account. Token ids only; no text.

Invariant: after `step` returns or raises, the scheduler and the runner agree on which
requests exist; an exception in the runner ends the engine, not the caller's data.
"""

import time

from tiny_vllm.core.scheduler import Scheduler
from tiny_vllm.errors import EngineDeadError
from tiny_vllm.protocol import (
    EngineCoreOutput,
    ModelRunner,
    ModelRunnerOutput,
    SchedulerOutput,
    StepRecord,
)


class EngineCore:
    """Joins a scheduler and a model runner."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self.last_step: StepRecord | None = None
        self._failure: str | None = None

    def check_alive(self) -> None:
        """Raise EngineDeadError when an earlier step failed."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine stopped: {self._failure}; build a new one")

    def kill(self, reason: str) -> None:
        """Refuse all further work, with the reason."""
        self._failure = self._failure or reason

    def step(self) -> list[EngineCoreOutput]:
        """Run one step.

        Raises:
            EngineDeadError: the engine failed before, or the model fails now.
        """
        self.check_alive()
        start = time.perf_counter()
        try:
            scheduled = self.scheduler.schedule()
            result = self._runner.execute(scheduled)
            outputs = self.scheduler.update_from_output(scheduled, result)
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
            raise EngineDeadError(f"the engine stopped: {error}") from error
        except BaseException:
            self.kill("it was interrupted in the middle of a step")
            raise
        self._record(start, scheduled, result)
        return outputs

    def _record(self, start: float, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        scheduler = self.scheduler
        self.last_step = StepRecord(
            step=scheduled.step,
            start=start,
            end=time.perf_counter(),
            num_decode_tokens=scheduled.num_decode_tokens,
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_requests=len(scheduled.num_scheduled_tokens),
            num_sampled=len(result.sampled),
            num_waiting=scheduler.num_waiting,
            num_cached_tokens=scheduler.cached_tokens_last_step,
            blocks_used=scheduler.blocks_used,
            blocks_total=scheduler.blocks_total,
            kv_bytes=result.kv_bytes,
            attention_context_tokens=result.attention_context_tokens,
            num_logit_rows=result.num_logit_rows,
        )
