"""Ask several questions about one document: the document is computed once."""

from tiny_vllm import LLM, SamplingParams

# Plain questions, and an answer ends at its first comma or full stop: the model has 135 million
# parameters and rambles, with the cache or without. The cache changes the time, not the answer.
DOCUMENT = """The old lighthouse of Arden stands on a rock north of the harbour. It was built in
1862, is 31 metres high and is painted red and white. The light can be seen from 20 miles away.
The keeper lives there with his dog Biscuit. In winter the sea covers the path to the rock, and he
rows to the village in a green boat called Marta to buy bread and oil. In summer he grows beans in
a small garden behind the tower. Visitors may climb the tower on Sundays; a ticket costs four
coins, and children pay nothing. From the top one sees the harbour, the fish market and, on a clear
day, the island of Skell, where the old stone for the tower was cut."""
QUESTIONS = [
    "What is the name of the dog?",
    "How high is the lighthouse?",
    "What does a ticket cost?",
    "From how far away can the light be seen?",
]


def main() -> None:
    # float32: in 16 bits, work in another shape may round to another token
    with LLM(model="smollm2-135m", max_model_len=2048, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=32, stop=[".", ","])
        for question in QUESTIONS:
            text = f"Answer from this text.\n{DOCUMENT}"
            messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
            (output,) = llm.generate(messages, params)
            prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
            print(f"{question}  [{cached} of {prompt} prompt tokens from the cache]")
            print(f"  {output.outputs[0].text.strip()}")
            (cold,) = llm.generate(messages, params, cache_salt=question)  # shares nothing
            assert cold.num_cached_tokens == 0
            assert cold.outputs[0].token_ids == output.outputs[0].token_ids


if __name__ == "__main__":
    main()
