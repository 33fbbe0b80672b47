"""python -m tiny_vllm.bench.flips: how many greedy answers part after a cache hit.

Each prompt is answered cold and alone, warm and alone, and warm in a batch. Work in another
shape rounds differently; where two tokens are nearly as likely the answers part. For every
answer that does, the first differing position and how far apart the two best tokens were there.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_vllm.bench.manifest import origin_of_run
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.engine.llm import LLM

SUBJECTS = ["the sea", "a clock", "bread", "the moon", "an old map"]
TEXTS = [
    "The history of {} begins",
    "Write one sentence about {}.",
    "def count_{0}(items):\n    '''Count {0}.'''\n",
    "Question: why do people like {}?\nAnswer:",
    "{} 是什么？ Explain in English: ",
    "1. {}\n2.",
    "Once upon a time there was {} that",
    "In 2026, {} cost 1234 euros; in 2027 it cost",
]
PROMPTS = [text.format(subject) for subject in SUBJECTS for text in TEXTS]


@dataclass(frozen=True, slots=True)
class Flip:
    """Where an answer leaves the cold one; ``gap``: top-2 difference of the cold logits there."""

    prompt: str
    position: int
    gap: float


def first_flip(cold: RequestOutput, other: RequestOutput) -> Flip | None:
    """The first position at which two answers of one length differ; ``cold`` has logprobs of 2."""
    answer = cold.outputs[0]
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, other.outputs[0].token_ids, strict=True)
    for position, (left, right) in enumerate(pairs):
        if left != right:
            # a difference of log-probabilities is one of logits
            best = sorted((p.logprob for p in answer.logprobs[position].values()), reverse=True)
            return Flip(str(cold.prompt), position, round(best[0] - best[1], 5))
    return None


def measure(llm: "LLM", prompts: list[str], num_tokens: int) -> dict[str, Any]:
    """Answer ``prompts`` in the three ways and compare.

    Raises:
        AssertionError: A warm run did not hit, or a cold one did.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    cold = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        cold += llm.generate([prompt], params)
    llm.generate(prompts, params)
    warm = [llm.generate([prompt], params)[0] for prompt in prompts]
    batched = llm.generate(prompts, params)
    assert all(output.num_cached_tokens == 0 for output in cold)
    assert all(output.num_cached_tokens > 0 for output in (*warm, *batched))
    return {"warm": _compare(cold, warm), "warm in a batch": _compare(cold, batched)}


def _compare(cold: list[RequestOutput], other: list[RequestOutput]) -> dict[str, Any]:
    flips = [flip for pair in zip(cold, other, strict=True) if (flip := first_flip(*pair))]
    gaps = [flip.gap for flip in flips]
    return {
        "answers": len(cold),
        "cached_tokens": sum(output.num_cached_tokens for output in other),
        "flips": [asdict(flip) for flip in flips],
        "median_gap": statistics.median(gaps) if gaps else None,
        "largest_gap": max(gaps, default=None),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tiny_vllm.bench.flips", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="bfloat16")
    add("--tokens", type=int, default=64, help="length of every answer")
    add("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    add("--out", type=Path, help="file for the results and what they were measured on")
    return parser


def main() -> None:
    """Measure, print a line a way of asking, and write the file if one is asked for."""
    from tiny_vllm.engine.llm import LLM

    options = _parser().parse_args()
    prompts = PROMPTS[: options.prompts]
    with LLM(options.model, dtype=options.dtype, max_model_len=1024, max_num_seqs=16) as llm:
        ways = measure(llm, prompts, options.tokens)
    for name, way in ways.items():
        print(f"{name}: {len(way['flips'])} of {way['answers']} answers part from the cold one")
        for flip in way["flips"]:
            print(f"  token {flip['position']:>3}, gap {flip['gap']:.4f}  {flip['prompt']!r}")
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    result = {"settings": settings, "ways": ways, **origin_of_run()}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    main()
