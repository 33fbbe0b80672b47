"""`LLM`: text in, text out, over one engine in this process.

Owns prompt forms, fan-out of ``n`` and the caller's order. Several streams and
`generate` calls may share one LLM: each output goes to the mailbox of its request.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.extended import ExtendedEngine
from tiny_vllm.engine.fan_out import RequestGroup
from tiny_vllm.engine.prefix_order import depth_first
from tiny_vllm.errors import ConfigError, InvalidRequestError
from tiny_vllm.outputs import PinnedPrefix, RequestOutput
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import Tokenizer

Message = Mapping[str, Any]
# The mapping is vLLM's: {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids"})


class _Progress(Protocol):
    def update(self, finished: int, new_tokens: int) -> None: ...


class LLM:
    """An engine with a tokenizer; as a context manager it shuts down at the end of the block.

    Args:
        model: path, Hugging Face id, .gguf file or alias.
        config: any field of `EngineConfig`, by name; ``tokenizer`` may be a path, too.

    Raises:
        ConfigError, ModelLoadError: names the value and the way out.
    """

    def __init__(self, model: str | os.PathLike[str] = "smollm2-135m", **config: Any) -> None:
        names = {"model": model, "tokenizer": config.pop("tokenizer", None)}
        config.update((key, _as_text(value)) for key, value in names.items())
        if not isinstance(config["model"], str):
            raise ConfigError(f"model must be a path, an id or an alias, got {model!r}")
        self.engine = ExtendedEngine.build(EngineConfig.create(**config))
        self._mailboxes: dict[str, RequestOutput | None] = {}  # the newest output
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ConfigError when the engine was built without one."""
        if self.engine.tokenizer is None:
            raise ConfigError(
                "this engine has no tokenizer (skip_tokenizer_init, or the model ships none); "
                "give token ids, or name one with tokenizer=..."
            )
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, by vLLM's name."""
        return self.tokenizer

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
        cache_salt: str | Sequence[str | None] | None = None,
        reorder: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come back in the caller's order.

        Args:
            prompts: one prompt or several; a prompt is text, token ids, chat messages, or
                {"prompt": text} or {"prompt_token_ids": ids}.
            params: one for all, or one a prompt; default `SamplingParams()`.
            use_progress: show a progress bar on stderr.
            cache_salt: one for all, or one a prompt; what has another salt shares no cache.
            reorder: prompts that begin alike run together, whatever their places in the list.

        Raises:
            InvalidRequestError: one prompt is refused; none of them is left running.
        """
        batch = _as_list(prompts)
        salts = _per_prompt("cache_salt", cache_salt, len(batch))
        groups: list[RequestGroup] = []
        try:
            for prompt, one in zip(batch, _params_list(params, len(batch)), strict=True):
                groups.append(self._prepare(prompt, one))
            order = range(len(groups))
            for index in depth_first([g.token_ids for g in groups]) if reorder else order:
                self._start(groups[index], salts[index])
            with _progress(use_progress, len(groups)) as bar:
                self._drive(groups, bar)
        finally:
            self.release(groups)
        return [group.output() for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one conversation or several, by the model's chat template."""
        return self.generate(messages, params, use_progress=use_progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> "OutputStream":
        """Complete one prompt, yielding the cumulative output as tokens come.

        The request is queued at once; closing the iterator aborts it.
        """
        group = self._prepare(prompt, params or SamplingParams())
        self._start(group, cache_salt)
        return OutputStream(self, group)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return (text if there is any, token ids) of a prompt.

        Raises:
            InvalidRequestError: a prompt of another type, or without tokens.
        """
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if _is_chat(prompt):
            text = self.tokenizer.apply_chat_template(prompt)  # type: ignore[arg-type]
            return text, self.tokenizer.encode(text, add_special_tokens=False)
        if _is_list(prompt) and all(isinstance(t, int) for t in prompt):
            return None, list(prompt)  # type: ignore[arg-type]
        raise InvalidRequestError(
            f"a prompt is text, a list of token ids or a list of messages, got {prompt!r:.80}",
            "prompt",
        )

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown or not prompt:
            raise InvalidRequestError(
                "a prompt as a dictionary has the key prompt (text) or prompt_token_ids, "
                f"got {', '.join(map(repr, unknown)) or 'none'}",
                "prompt",
            )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be text, got {text!r:.80}", "prompt")
        if token_ids is None:
            return self.encode(text)  # type: ignore[arg-type]
        if not _is_list(token_ids) or not all(isinstance(t, int) for t in token_ids):
            raise InvalidRequestError(
                f"prompt_token_ids must be a list of token ids, got {token_ids!r:.80}", "prompt"
            )
        return text, list(token_ids)

    def pin(
        self, prompt: Prompt, *, ttl: float | None = None, cache_salt: str | None = None
    ) -> PinnedPrefix:
        """Compute a prompt if need be, and keep its full blocks in the cache.

        Pins yield only to a request that could not run otherwise.

        Args:
            ttl: seconds until the pin is dropped; None keeps it until `unpin`.

        Raises:
            InvalidRequestError: bad values, or more pinned blocks than ``max_pinned_share``
                of the cache; names both numbers.
        """
        _, token_ids = self.encode(prompt)
        once = SamplingParams(max_tokens=1, temperature=0.0)
        self.generate([{"prompt_token_ids": token_ids}], once, cache_salt=cache_salt)
        return self.engine.pin_prefix(token_ids, ttl, cache_salt)

    def unpin(self, pin: PinnedPrefix) -> bool:
        """Let go of a pin; False when its time was over, or it had to yield to a request."""
        return self.engine.unpin(pin.pin_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, pinned ones too; False while requests are running."""
        return self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort everything and refuse further work."""
        for request_id in list(self._mailboxes):
            self.engine.abort(request_id)
        self._mailboxes.clear()
        self.engine.shutdown()

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> RequestGroup:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be SamplingParams, got {params!r:.80}", "params"
            )
        text, token_ids = self.encode(prompt)
        return RequestGroup(str(next(self._ids)), params, text, token_ids)

    def _start(self, group: RequestGroup, cache_salt: str | None) -> None:
        try:
            for request_id, child in group.children():
                self.engine.add_request(request_id, group.token_ids, child, group.text, cache_salt)
                self._mailboxes[request_id] = None
        except BaseException:
            self.release([group])
            raise

    def _drive(self, groups: list[RequestGroup], bar: _Progress | None) -> None:
        open_groups = groups
        while open_groups:
            self.step()
            new_tokens = sum(self.collect(group) for group in open_groups)
            open_groups = [group for group in open_groups if not group.finished]
            if bar is not None:
                bar.update(len(groups) - len(open_groups), new_tokens)

    def step(self) -> None:
        """Run one engine step and put each output into the mailbox of its request."""
        for output in self.engine.step():
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id] = output  # cumulative: the newest says it all

    def follows(self, group: RequestGroup) -> bool:
        """True until the group is released."""
        return any(request_id in self._mailboxes for request_id in group.request_ids)

    def collect(self, group: RequestGroup) -> int:
        """Move a group's new outputs out of their mailboxes; return its new tokens."""
        before = group.num_tokens
        for request_id in group.request_ids:
            output = self._mailboxes.get(request_id)
            if output is not None:
                group.take(output)
                self._mailboxes[request_id] = None
        return group.num_tokens - before + group.just_finished()

    def release(self, groups: Sequence[RequestGroup]) -> None:
        """Forget groups; what is not finished is aborted."""
        for group in groups:
            for request_id in group.request_ids:
                if request_id not in self._mailboxes:
                    continue
                del self._mailboxes[request_id]
                if not group.finished:
                    self.engine.abort(request_id)


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one request as they come; `close`, or dropping it, aborts the request."""

    def __init__(self, llm: LLM, group: RequestGroup) -> None:
        self._llm, self._group = llm, group

    def __next__(self) -> RequestOutput:
        if self._group.finished or not self._llm.follows(self._group):
            self.close()
            raise StopIteration
        try:
            while not self._llm.collect(self._group):
                self._llm.step()
        except BaseException:
            self.close()
            raise
        if self._group.finished:
            self.close()
        return self._group.output()

    def close(self) -> None:
        """Abort the request unless it is finished."""
        self._llm.release([self._group])

    def __del__(self) -> None:
        self.close()


def _is_list(value: object) -> bool:
    """A sequence that is neither text nor bytes: the numbers of bytes are no token ids."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(m, Mapping) and not PROMPT_KEYS & m.keys() for m in prompt)
    )


def _as_text(value: object) -> object:
    """A path as text; anything else as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or _is_chat(prompts):
        return [prompts]
    if _is_list(prompts) and prompts and all(isinstance(t, int) for t in prompts):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidRequestError(
            f"prompts must be a list or one prompt, got {prompts!r}", "prompts"
        )
    return list(prompts)


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams) and not _is_list(params):
        raise InvalidRequestError(
            f"params must be SamplingParams or a list of them, got {params!r:.80}", "params"
        )
    return _per_prompt("params", params, count)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for all prompts, or one a prompt."""
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(
            f"{len(value)} values of {name} for {count} prompts: give one, or one a prompt", name
        )
    return list(value)


def _progress(enabled: bool, total: int) -> AbstractContextManager[_Progress | None]:
    if not enabled:
        return nullcontext()
    from tiny_vllm.engine.progress import ProgressBar

    return ProgressBar(total)
