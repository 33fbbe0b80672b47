"""Built-in workloads, and the caps that the environment switches put on any workload.

Token ids are drawn with the seed inside the model's vocabulary, above the special ids;
all are greedy and ignore end-of-sequence. `demo` is real text and needs a tokenizer.
"""

import difflib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tiny_vllm.bench.trace import TraceRequest, read_trace
from tiny_vllm.env import Switches
from tiny_vllm.errors import ConfigError, TraceError

FIRST_RANDOM_ID = 10  # ids below are special tokens in many vocabularies
SEED_LENGTH = 8192  # MAX_SEQ_LEN of the reference
SHARED = re.compile(r"shared-([1-9]\d*)x(\d+(?:\.\d+)?)k")
SHARED_OUTPUT = {"shared-16x1.5k": 64}
DATA = Path(__file__).parent / "data"


class PromptEncoder(Protocol):
    """Turns text into token ids; the model's tokenizer behind a narrow door."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


EncoderFactory = Callable[[], PromptEncoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A tokenized trace. ``is_random`` says that no prompt repeats another on purpose."""

    name: str
    requests: tuple[TraceRequest, ...]
    scale: float = 1.0
    is_random: bool = False
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Most tokens (prompt + output) a request asks for."""
        return max(r.num_prompt_tokens + r.max_tokens for r in self.requests)


@dataclass(frozen=True, slots=True)
class Draw:
    """Scaled lengths and random ids of one workload."""

    rng: random.Random
    vocab_size: int
    scale: float
    max_seq_len: int | None = None

    def length(self, tokens: float) -> int:
        return max(1, round(tokens * self.scale))

    def ids(self, tokens: float) -> list[int]:
        low = FIRST_RANDOM_ID if self.vocab_size > 2 * FIRST_RANDOM_ID else 0
        return self.rng.choices(range(low, self.vocab_size), k=self.length(tokens))

    def request(self, number: int, prompt: Sequence[int], output: float) -> TraceRequest:
        return TraceRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            max_tokens=self.length(output),
        )


def _seed(draw: Draw) -> list[TraceRequest]:
    common = draw.ids(512)
    own = draw.rng.sample(range(FIRST_RANDOM_ID, draw.vocab_size), 2)
    total = draw.max_seq_len or draw.length(SEED_LENGTH)
    requests = [draw.request(i, [*common, token], 1) for i, token in enumerate(own)]
    return [replace(r, max_tokens=max(1, total - r.num_prompt_tokens)) for r in requests]


def _cold(count: int, prompt: int, output: int) -> Callable[[Draw], list[TraceRequest]]:
    def build(draw: Draw) -> list[TraceRequest]:
        return [draw.request(i, draw.ids(prompt), output) for i in range(count)]

    return build


def _shared(count: int, prompt: float, output: int) -> Callable[[Draw], list[TraceRequest]]:
    def build(draw: Draw) -> list[TraceRequest]:
        common = draw.ids(prompt)
        return [draw.request(i, [*common, *draw.ids(64)], output) for i in range(count)]

    return build


def _forest(draw: Draw) -> list[TraceRequest]:
    common = draw.ids(1024)
    documents = [[*common, *draw.ids(8192)] for _ in range(8)]
    prompts = [[*document, *draw.ids(64)] for _ in range(16) for document in documents]
    return [draw.request(i, prompt, 128) for i, prompt in enumerate(prompts)]


BUILDERS: dict[str, Callable[[Draw], list[TraceRequest]]] = {
    "seed": _seed,
    "single": _cold(1, 1024, 512),
    "prefill-1x8k": _cold(1, 8192, 1),
    "prefill-1x32k": _cold(1, 32768, 1),
    "cold-64x2k": _cold(64, 2048, 128),
    "forest": _forest,
}


@dataclass(frozen=True, slots=True)
class Description:
    """A built-in workload in words: lengths in tokens, and what it is for."""

    requests: str
    prompt: str
    output: str
    shows: str


DESCRIPTIONS: dict[str, Description] = {
    "demo": Description(
        *("16", "about 1500: one real document and a question each", "64"),
        "The default: document questions as chats, in real text.",
    ),
    "shared-BxPk": Description(
        *("B", "P x 1024 common + 64 own", "256 (shared-16x1.5k: 64)"),
        "One prefix under many requests; B and P are yours, as in shared-32x8k.",
    ),
    "forest": Description(
        *("128", "1024 common to all + 8192 of one of 8 documents + 64 own", "128"),
        "A tree of prefixes: 16 questions on each document, interleaved.",
    ),
    "seed": Description(
        *("2", "512 common + 1 own", "7679 (to MAX_SEQ_LEN, 8192)"),
        "Long outputs: decoding alone, with hardly a prefix.",
    ),
    "single": Description(*("1", "1024", "512"), "One user alone: latency."),
    "prefill-1x8k": Description(*("1", "8192", "1"), "Prefill alone."),
    "prefill-1x32k": Description(*("1", "32768", "1"), "Prefill of a very long prompt."),
    "cold-64x2k": Description(
        *("64", "2048, all different", "128"),
        "No prefix at all: what the cache costs where it cannot help.",
    ),
}
RANDOM = frozenset({"single", "prefill-1x8k", "prefill-1x32k", "cold-64x2k"})
NAMES = (*BUILDERS, "shared-32x8k", "shared-16x1.5k", "demo")


def _builder(name: str) -> Callable[[Draw], list[TraceRequest]]:
    if "/" in name or name.endswith((".jsonl", ".json")):
        found = "is a folder" if Path(name).is_dir() else "no such trace file"
        raise TraceError(f"workload {name!r}: {found}; give a JSONL file, one request a line")
    match = SHARED.fullmatch(name)
    if match and float(match[2]) > 0:
        output = SHARED_OUTPUT.get(name, 256)
        return _shared(int(match[1]), float(match[2]) * 1024, output)
    if name in BUILDERS:
        return BUILDERS[name]
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(NAMES)
    raise TraceError(
        f"unknown workload {name!r}; {hint} (shared-BxPk takes any B and P; "
        "a trace file needs a path that exists)"
    )


def demo_requests(encoder: PromptEncoder, draw: Draw) -> list[TraceRequest]:
    """One document and 16 questions about it, as chats; ``scale`` shortens the document."""
    words = (DATA / "handbook.txt").read_text(encoding="utf-8").split(" ")
    document = " ".join(words[: draw.length(len(words))])
    questions = (DATA / "questions.txt").read_text(encoding="utf-8").splitlines()
    requests = []
    for number, question in enumerate(questions):
        text = f"Answer from this handbook.\n\n{document}\n\nQuestion: {question}"
        ids = encoder.encode_chat([{"role": "user", "content": text}])
        requests.append(draw.request(number, ids, 64))
    return requests


def tokenize(requests: Sequence[TraceRequest], encoder: EncoderFactory) -> list[TraceRequest]:
    """Replace text prompts by token ids; ``encoder`` is only made when one is there."""
    made: list[PromptEncoder] = []
    return [r if r.prompt_token_ids is not None else _encoded(r, encoder, made) for r in requests]


def _encoded(
    request: TraceRequest, factory: EncoderFactory, made: list[PromptEncoder]
) -> TraceRequest:
    if not made:
        made.append(factory())
    if request.messages is not None:
        ids = made[0].encode_chat([dict(message) for message in request.messages])
    else:
        ids = made[0].encode(request.prompt or "")
    return replace(request, prompt_token_ids=tuple(ids), prompt=None, messages=None)


def build_workload(
    name: str,
    vocab_size: int,
    encoder: EncoderFactory,
    *,
    seed: int = 0,
    scale: float = 1.0,
    switches: Switches | None = None,
) -> Workload:
    """A built-in workload, or the trace file at path ``name``, tokenized and capped.

    Raises:
        TraceError: unknown name, or a bad line in the file.
        ConfigError: ``scale`` outside (0, 1], or given for a trace file.
    """
    caps = switches or Switches()
    if not 0 < scale <= 1:
        raise ConfigError(f"scale={scale} must be above 0 and at most 1")
    if Path(name).is_file():
        if scale != 1:
            raise ConfigError(f"scale={scale} shrinks built-in workloads only, not {name}")
        requests = tokenize(list(read_trace(name, vocab_size)), encoder)
        workload = Workload(name=Path(name).name, requests=tuple(requests))
    else:
        draw = Draw(random.Random(f"{name}/{seed}"), vocab_size, scale, caps.max_seq_len)
        built = demo_requests(encoder(), draw) if name == "demo" else _builder(name)(draw)
        workload = Workload(name=name, requests=tuple(built), scale=scale, is_random=name in RANDOM)
    return cap(workload, caps)


def cap(workload: Workload, switches: Switches) -> Workload:
    """Shorten outputs to MAX_SEQ_LEN and MAX_NEW_TOKENS_GENERATED (0 or unset: no cap).

    Notes say how many requests were changed. A prompt that leaves no room for output under
    MAX_SEQ_LEN is kept, and refused when it is run; so is one above MAX_PROMPT_LEN.
    """
    requests, notes = list(workload.requests), list(workload.notes)
    for switch, change in (
        ("MAX_SEQ_LEN", _total_cap(switches.max_seq_len)),
        ("MAX_NEW_TOKENS_GENERATED", _output_cap(switches.max_new_tokens_generated)),
    ):
        capped = [change(request) for request in requests]
        changed = sum(a is not b for a, b in zip(requests, capped, strict=True))
        if changed:
            value = getattr(switches, switch.lower())
            notes.append(f"{switch}={value} shortened {changed} of {len(requests)} requests")
        requests = capped
    return replace(workload, requests=tuple(requests), notes=tuple(notes))


_Change = Callable[[TraceRequest], TraceRequest]


def _total_cap(limit: int | None) -> _Change:
    def change(request: TraceRequest) -> TraceRequest:
        room = (limit or 0) - request.num_prompt_tokens
        if not limit or room < 1 or request.max_tokens <= room:
            return request
        return replace(request, max_tokens=room)

    return change


def _output_cap(limit: int | None) -> _Change:
    def change(request: TraceRequest) -> TraceRequest:
        if not limit or request.max_tokens <= limit:
            return request
        return replace(request, max_tokens=limit)

    return change
