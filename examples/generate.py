"""Complete a few prompts in one batch."""

from tiny_vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model="smollm2-135m", max_model_len=512) as llm:
        for output in llm.generate(PROMPTS, params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main()
