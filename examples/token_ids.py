"""Token ids in, token ids out, without a tokenizer; the second run comes from the cache."""

from tiny_vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(model="smollm2-135m", max_model_len=512, dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prompt = [1, 4093, 198, 284, 260, 638, 282] * 12
    cold = llm.generate(prompt, params)[0]
    warm = llm.generate(prompt, params)[0]
    for name, output in (("cold", cold), ("warm", warm)):
        completion = output.outputs[0]
        print(f"{name}: {completion.token_ids}")
        print(f"  {output.num_cached_tokens} of {len(prompt)} prompt tokens from the cache")
        best = [next(iter(step.values())).logprob for step in completion.logprobs]
        print(f"  log-probabilities: {', '.join(f'{value:.3f}' for value in best)}")
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    print("the answer is the same, hit or miss")
    llm.shutdown()


if __name__ == "__main__":
    main()
