"""What one run of one variant leaves behind, as plain data and as JSON lines.

Times are seconds after the start of the run. Reading a line back gives the object that
was written.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.metrics import PeakMemory
from tiny_vllm.protocol import EngineInfo, KvBytes, StepRecord, TokenLedger

TIME_DIGITS = 7


@dataclass(slots=True)
class RequestRecord:
    """One request of one run; exactly one of ``finish_reason`` and ``error`` may be None."""

    request_id: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    preemptions: int = 0
    cache_report: Mapping[str, Any] | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def to_json(self) -> dict[str, Any]:
        """A row of requests.jsonl, without variant and repeat."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        times = [round(t, TIME_DIGITS) for t in self.token_times]
        row |= {"arrival": round(self.arrival, TIME_DIGITS), "token_times": times}
        row["first_token"] = times[0] if times else None
        row["output_tokens"] = len(self.output_token_ids)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "RequestRecord":
        return cls(**{f.name: row[f.name] for f in dataclasses.fields(cls)})


def step_to_json(step: StepRecord) -> dict[str, Any]:
    """A row of steps.jsonl, without variant and repeat."""
    row = dataclasses.asdict(step)
    row |= {"start": round(step.start, TIME_DIGITS), "end": round(step.end, TIME_DIGITS)}
    return {"kind": step.kind, **row}


def step_from_json(row: Mapping[str, Any]) -> StepRecord:
    """The step that `step_to_json` wrote."""
    values = {f.name: row[f.name] for f in dataclasses.fields(StepRecord)}
    return StepRecord(**{**values, "kv_bytes": KvBytes(**row["kv_bytes"])})


@dataclass(slots=True)
class RunResult:
    """One run: what the process that ran it sends back.

    Attributes:
        wall_s: start of the run to the end of its last step, warm-up excluded.
        ledger: tokens of this run alone, warm-up excluded.
        environment: device name, torch version, number of threads.
        build_s, warmup_s: seconds spent before the clock started.
    """

    info: EngineInfo
    requests: list[RequestRecord]
    steps: list[StepRecord]
    wall_s: float
    ledger: TokenLedger
    peak_memory: PeakMemory
    environment: Mapping[str, Any] = field(default_factory=dict)
    build_s: float = 0.0
    warmup_s: float = 0.0

    def header(self) -> dict[str, Any]:
        """The run's entry in manifest.json: everything but requests and steps."""
        return {
            "wall_s": self.wall_s,
            "build_s": self.build_s,
            "warmup_s": self.warmup_s,
            "info": dataclasses.asdict(self.info),
            "ledger": dataclasses.asdict(self.ledger),
            "peak_memory": dataclasses.asdict(self.peak_memory),
            "environment": dict(self.environment),
        }


def ledger_difference(after: TokenLedger, before: TokenLedger) -> TokenLedger:
    """Tokens counted between two readings of one ledger."""
    names = [f.name for f in dataclasses.fields(TokenLedger)]
    return TokenLedger(**{name: getattr(after, name) - getattr(before, name) for name in names})
