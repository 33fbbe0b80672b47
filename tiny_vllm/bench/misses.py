"""What the cache reports of a run folder say: pure functions of its files."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tiny_vllm.bench.folder import RunData
from tiny_vllm.bench.records import RequestRecord
from tiny_vllm.cache_report import CacheReport, MissReason
from tiny_vllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A request with the report of its look-up; None for an engine that looks nothing up."""

    request_id: str
    prompt_tokens: int
    report: CacheReport | None


def variants_with_reports(data: RunData) -> list[str]:
    """Variants of which some request has a report, in the order of the run."""
    names = [entry["name"] for entry in data.manifest["variants"]]
    return [name for name in names if any(r.cache_report for r in _requests(data, name, 0))]


def explained(
    data: RunData, variant: str, request_id: str | None = None, repeat: int = 0
) -> list[ExplainedRequest]:
    """The requests of a variant, or one of them.

    Raises:
        ConfigError: no such variant, repeat or request in the folder.
    """
    known = [entry["name"] for entry in data.manifest["variants"]]
    if variant not in known:
        raise ConfigError(f"--variant {variant!r}: this run has {', '.join(known)}")
    records = _requests(data, variant, repeat)
    if not records:
        raise ConfigError(f"--repeat {repeat}: {variant} has no such run in this folder")
    chosen = [r for r in records if request_id is None or r.request_id == request_id]
    if not chosen:
        ids = [r.request_id for r in records]
        shown = ", ".join(ids[:8]) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
        raise ConfigError(f"request {request_id!r} is not in this run; there are {shown}")
    return [_explained(record) for record in chosen]


def with_text(
    requests: Iterable[ExplainedRequest], token_text: Callable[[int], str] | None
) -> list[ExplainedRequest]:
    """The same requests with the texts of the tokens at which they diverged."""
    if token_text is None:
        return list(requests)
    return [replace(r, report=r.report and r.report.with_text(token_text)) for r in requests]


def totals(requests: Iterable[ExplainedRequest]) -> dict[str, int]:
    """Prompt tokens found and missed, by reason; they add up to the prompts."""
    counts = {"hit": 0, **{reason.value: 0 for reason in MissReason}}
    for request in requests:
        if request.report is None:
            continue
        counts["hit"] += request.report.cached_tokens
        for reason, count in request.report.missed_tokens().items():
            counts[reason.value] += count
    return counts


def to_json(request: ExplainedRequest) -> Mapping[str, object]:
    """One line for programs: the report and its sentence."""
    report = request.report
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "cache_report": None if report is None else report.to_dict(),
        "text": None if report is None else report.describe(),
    }


def _requests(data: RunData, variant: str, repeat: int) -> list[RequestRecord]:
    return data.requests.get((variant, repeat), [])


def _explained(record: RequestRecord) -> ExplainedRequest:
    report = CacheReport.from_dict(record.cache_report) if record.cache_report else None
    return ExplainedRequest(record.request_id, record.prompt_tokens, report)
