"""Sampling parameters: each bad value is refused with its field, the value and the bound."""

import inspect
from typing import Any

import pytest

from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.sampling_params import SamplingParams

BAD = [
    ("n", 0, "[1, 256]"),
    ("n", 257, "[1, 256]"),
    ("n", 1.5, "[1, 256]"),
    ("n", True, "[1, 256]"),
    ("temperature", -0.1, "[0, 100]"),
    ("temperature", 101, "[0, 100]"),
    ("temperature", float("nan"), "[0, 100]"),
    ("temperature", float("inf"), "[0, 100]"),
    ("temperature", "hot", "[0, 100]"),
    ("top_k", -2, ">= -1"),
    ("top_k", 1.0, ">= -1"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", None, "(0, 1]"),
    ("temperature", 10**400, "[0, 100]"),
    ("top_p", 10**400, "(0, 1]"),
    ("min_p", float("inf"), "[0, 1]"),
    ("presence_penalty", float("-inf"), "[-2, 2]"),
    ("stop_token_ids", 5, "must be a list"),
    ("stop_token_ids", {5: 1}, "must be a list"),
    ("stop", 5, "must be a list"),
    ("stop", 0, "must be a list"),
    ("stop", b"x", "must be a list"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("repetition_penalty", 0.0, "(0, 100]"),
    ("repetition_penalty", 101.0, "(0, 100]"),
    ("presence_penalty", -2.1, "[-2, 2]"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("frequency_penalty", 2.1, "[-2, 2]"),
    ("seed", 1.5, "-9223372036854775808"),
    ("seed", 2**63, "9223372036854775807"),
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", -1, ">= 1"),
    ("max_tokens", 1.0, ">= 1"),
    ("min_tokens", -1, ">= 0"),
    ("logprobs", -1, "[0, 100]"),
    ("logprobs", 101, "[0, 100]"),
    ("prompt_logprobs", -1, "[0, 100]"),
    ("prompt_logprobs", 101, "[0, 100]"),
    ("stop_token_ids", [-1], ">= 0"),
    ("stop_token_ids", ["x"], ">= 0"),
    ("ignore_eos", 1, "True or False"),
    ("include_stop_str_in_output", "no", "True or False"),
    ("skip_special_tokens", None, "True or False"),
]


@pytest.mark.parametrize(("field", "value", "bound"), BAD)
def test_bad_value_names_field_value_and_bound(field: str, value: Any, bound: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    shown = value[0] if isinstance(value, list) else value
    assert caught.value.field == field
    assert field in message
    assert repr(shown) in message
    assert bound in message


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("stop", "", "non-empty"),
        ("stop", ["ok", ""], "non-empty"),
        ("stop", [3], "3"),
        ("stop", ["x"] * 65, "65 strings, the limit is 64"),
        ("logit_bias", [1], "must map"),
    ],
)
def test_bad_stop_and_bias(field: str, value: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("bias", "part"), [({1: 100.5}, "100.5"), ({-1: 0.0}, "-1"), ({"a": 1}, "'a'")]
)
def test_bad_logit_bias_entries(bias: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias") as caught:
        SamplingParams(logit_bias=bias)
    assert part in str(caught.value)


def test_min_tokens_above_max_tokens_names_both() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens=9 is above max_tokens=8") as caught:
        SamplingParams(min_tokens=9, max_tokens=8)
    assert caught.value.field == "min_tokens"
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


@pytest.mark.parametrize(
    "values",
    [
        {"n": 256},
        {"temperature": 0},
        {"temperature": 100},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1.0},
        {"presence_penalty": -2},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1, "min_tokens": 1},
        {"logprobs": 0},
        {"logprobs": 100},
        {"logit_bias": {0: -100}},
    ],
)
def test_the_bounds_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


def test_stop_is_a_tuple_whatever_the_form() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_replace_checks_again_and_leaves_the_original() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3], max_tokens=5)
    changed = params.replace(max_tokens=6)
    assert (changed.max_tokens, changed.stop_strings, changed.stop_token_ids) == (6, ("end",), (3,))
    assert params.max_tokens == 5
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        params.replace(max_tokens=0)


def test_an_unknown_keyword_names_the_nearest() -> None:
    """It used to be a TypeError of the dataclass, without a hint."""
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'") as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert caught.value.field == "temprature"
    with pytest.raises(InvalidRequestError, match="unknown SamplingParams key 'zzz'; known: n, "):
        SamplingParams().replace(zzz=1)
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "temperature"]


def test_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
