"""Command-line flags generated from the fields of `EngineConfig` and `SamplingParams`.

Each flag defaults to "not given", so that flags win over environment switches, and
switches over the defaults of the dataclass. The help texts below are the only ones:
docs/config.md is generated from them.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from tiny_vllm.config import EngineConfig
from tiny_vllm.env import Switches
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.sampling_params import SamplingParams

ENGINE_HELP = {
    "model": "Model: an alias, a folder, a .gguf file or a Hugging Face id.",
    "tokenizer": "Tokenizer: a folder, a file or an id; taken from the model if not given.",
    "revision": "Branch, tag or commit of a Hugging Face id.",
    "load_format": "Weights: auto, safetensors, gguf, or dummy (random, from the shape alone).",
    "dtype": "Type of weights and KV cache: auto, float32, bfloat16, float16.",
    "device": "Device: auto, cpu, cuda or cuda:N.",
    "max_model_len": "Longest request, prompt and output, in tokens.",
    "block_size": "Tokens per KV-cache block.",
    "num_blocks": "KV-cache blocks, instead of a size in bytes.",
    "kv_cache_memory_bytes": "Size of the KV cache in bytes.",
    "gpu_memory_utilization": "Share of GPU memory that weights, KV cache and work space may use.",
    "max_num_batched_tokens": "Token budget of one step.",
    "max_num_seqs": "Requests that run at the same time.",
    "enable_prefix_caching": "Keep the KV cache of seen prefixes and reuse it.",
    "enable_partial_block_reuse": "Reuse the beginning of a block that matches only in part.",
    "enable_chunked_prefill": "Split long prompts over steps, mixed with decodes.",
    "use_cuda_graph": "Replay decode steps from CUDA graphs.",
    "attention_backend": "auto, torch or triton; auto takes Triton kernels where a GPU runs them.",
    "async_scheduling": "Launch a decode step on the GPU before the last one's tokens are read.",
    "attention": "forest reads a shared prefix once per step; per-request is its plain twin.",
    "schedule": "Order of waiting requests: fcfs, or prefix (longest cached prefix first).",
    "max_held_steps": "Steps a request waits at most while another one computes its prefix.",
    "max_pinned_share": "Share of the KV-cache blocks that pinned prefixes may hold.",
    "seed": "Seed of the engine: dummy weights, and draws of requests without a seed.",
    "num_threads": "CPU threads.",
    "debug_checks": "Check the invariants of scheduler and cache after every step (slow).",
    "skip_tokenizer_init": "Load no tokenizer: prompts and outputs are token ids only.",
}

SAMPLING_HELP = {
    "n": "Independent completions of each prompt.",
    "temperature": "Randomness; 0 takes the most likely token.",
    "top_k": "Sample from the k most likely tokens; 0 or -1 keeps all.",
    "top_p": "Sample from the smallest set of tokens with this mass.",
    "min_p": "Drop tokens less likely than this share of the most likely one.",
    "repetition_penalty": "Above 1 discourages tokens of prompt and output.",
    "presence_penalty": "Subtracted once from the logit of each token already in the output.",
    "frequency_penalty": "Subtracted per occurrence in the output.",
    "logit_bias": "ID=BIAS added to the logit of a token; may be repeated.",
    "seed": "Makes the random draws of each request repeatable.",
    "max_tokens": "Output limit in tokens.",
    "min_tokens": "No end of the output before this many tokens.",
    "stop": "Text that ends the output; may be repeated.",
    "stop_token_ids": "Token id that ends the output; may be repeated.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "ignore_eos": "Go on after the model's end token.",
    "logprobs": "Report this many most likely tokens per output token (generate: with --json).",
    "prompt_logprobs": "The same per prompt token; bypasses the prefix cache.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", list[int]: "INT", list[str]: "TEXT"}

# For people at a terminal: repeatable text, and enough of it.
SAMPLING_CLI_DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 256}


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one dataclass: ``parameter`` receives those that were given, by field name.

    ``hidden`` fields are documented, but for Python alone: no command has a use for them.
    """

    cls: type
    parameter: str
    help: Mapping[str, str]
    panel: str
    renamed: Mapping[str, str] = field(default_factory=dict)  # field -> flag
    more_names: Mapping[str, str] = field(default_factory=dict)  # field -> second name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # shown in the help
    hidden: frozenset[str] = frozenset()

    def without(self, *names: str) -> "FlagGroup":
        """The group with fewer flags, for a command that has no use for some."""
        return dataclasses.replace(self, hidden=self.hidden | {*names})

    def flags(self) -> Iterator[tuple[str, str, "dataclasses.Field[Any]"]]:
        """The fields that have a flag."""
        return (entry for entry in self.fields() if entry[0] not in self.hidden)

    def fields(self) -> Iterator[tuple[str, str, "dataclasses.Field[Any]"]]:
        """Yield (field name, flag name with underscores, field) of every field with a help."""
        for item in dataclasses.fields(self.cls):
            if item.name in self.help:
                yield item.name, self.renamed.get(item.name, item.name), item

    def default_of(self, item: "dataclasses.Field[Any]") -> Any:
        if item.name in self.defaults:
            return self.defaults[item.name]
        return None if item.default is dataclasses.MISSING else item.default


ENGINE = FlagGroup(
    EngineConfig,
    "engine",
    ENGINE_HELP,
    "Engine",
    renamed={"seed": "engine_seed"},
    more_names={"model": "-m", "num_threads": "--threads"},
    hidden=frozenset({"skip_tokenizer_init"}),
)
SAMPLING = FlagGroup(
    SamplingParams, "sampling", SAMPLING_HELP, "Sampling", defaults=SAMPLING_CLI_DEFAULTS
)


def _value_type(annotation: Any) -> Any:
    """The type of one flag value: bool, int, float, str, list[int] or list[str]."""
    if isinstance(annotation, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        # a str | Sequence[str] field becomes a repeatable flag
        annotation = members[-1]
    origin = typing.get_origin(annotation)
    if origin is None:
        return annotation
    if issubclass(origin, Mapping):
        return list[str]
    return list[int] if typing.get_args(annotation) == (int,) else list[str]


def _flag_name(name: str, is_bool: bool) -> str:
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if is_bool else f"--{flag}"


def _help_text(group: FlagGroup, item: "dataclasses.Field[Any]") -> str:
    default = group.default_of(item)
    shown = {True: "on", False: "off"}.get(default) if isinstance(default, bool) else default
    return group.help[item.name] + (f" Default: {shown}." if shown is not None else "")


def _parameters(group: FlagGroup) -> Iterator[inspect.Parameter]:
    for name, flag, item in group.flags():
        value_type = _value_type(item.type)
        names = [_flag_name(flag, value_type is bool)]
        if name in group.more_names:
            names.append(group.more_names[name])
        option = typer.Option(
            *names,
            help=_help_text(group, item),
            metavar=METAVARS.get(value_type),
            rich_help_panel=group.panel,
            show_default=False,
        )
        yield inspect.Parameter(
            flag,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[value_type | None, option],
        )


def _take_given(group: FlagGroup, values: dict[str, Any]) -> dict[str, Any]:
    given = {}
    for name, flag, _ in group.flags():
        value = values.pop(flag)
        if value is not None and value != []:
            given[name] = value
    return given


def with_flags(*groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter of each group by its flags; the function gets a dict of those given."""

    def decorate(func: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(func)
        def command(**values: Any) -> None:
            taken = {group.parameter: _take_given(group, values) for group in groups}
            func(**values, **taken)

        replaced = {group.parameter for group in groups}
        own = inspect.signature(func).parameters.values()
        parameters = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in replaced
        ]
        for group in groups:
            parameters.extend(_parameters(group))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def engine_settings(flags: Mapping[str, Any], switches: Switches) -> dict[str, Any]:
    """Engine keys from switches and flags; a flag wins."""
    return {**switches.engine_settings(), **flags}


def _parse_bias(entries: Sequence[str]) -> dict[int, float]:
    bias = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise InvalidRequestError(
                f"--logit-bias {entry!r} cannot be parsed: write TOKEN_ID=BIAS, as in 42=-5",
                "logit_bias",
            ) from None
    return bias


def sampling_params(flags: Mapping[str, Any], switches: Switches) -> SamplingParams:
    """Sampling parameters from defaults, switches and flags; a flag wins.

    Raises:
        InvalidRequestError: a value out of its bounds, or a bias that cannot be parsed.
    """
    values = {**SAMPLING_CLI_DEFAULTS}
    if switches.max_new_tokens_generated is not None:
        values["max_tokens"] = switches.max_new_tokens_generated or None  # 0 = no cap
    values.update(flags)
    if "logit_bias" in flags:
        values["logit_bias"] = _parse_bias(flags["logit_bias"])
    return SamplingParams(**values)


def _spoken_names() -> dict[str, str]:
    """Field name -> flag, for every flag."""
    groups = (ENGINE, SAMPLING)
    return {name: f"--{flag.replace('_', '-')}" for g in groups for name, flag, _ in g.flags()}


_FIELD = re.compile(r"(?<![\w'\"./-])([a-z]\w*)(?![\w'\"-])(=\.\.\.|=)?")


def in_cli_words(message: str) -> str:
    """An error message of the library with its settings written as flags.

    A word is taken for a setting when it holds an underscore, or a value follows it.
    """
    names = _spoken_names()

    def spoken(match: re.Match[str]) -> str:
        name, equals = match[1], match[2] or ""
        if name not in names or not (equals or "_" in name):
            return match[0]
        return names[name] + (" ..." if equals == "=..." else equals)

    return _FIELD.sub(spoken, message)
