"""Ask several questions about one document: the document is computed once."""

from tiny_vllm import LLM, SamplingParams

DOCUMENT = "\n".join(
    f"Room {number}: built in {1900 + number}, {number * 3} seats, "
    f"{'with' if number % 2 else 'without'} a projector."
    for number in range(1, 25)
)
QUESTIONS = [
    "How many seats has room 7?",
    "When was room 12 built?",
    "Has room 9 a projector?",
]


def main() -> None:
    llm = LLM(model="smollm2-135m", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=32)
    for question in QUESTIONS:
        messages = [
            {"role": "system", "content": f"Answer from this list.\n{DOCUMENT}"},
            {"role": "user", "content": question},
        ]
        output = llm.chat(messages, params)[0]
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"{question}  [{cached} of {prompt} prompt tokens from the cache]")
        print(f"  {output.outputs[0].text.strip()}")
    llm.shutdown()


if __name__ == "__main__":
    main()
