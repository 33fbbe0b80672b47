"""Print an answer as its tokens come, and stop it early."""

from tiny_vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(model="smollm2-135m", max_model_len=512)
    messages = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
    stream = llm.stream(messages, SamplingParams(temperature=0, max_tokens=200))
    shown = 0
    for output in stream:
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if text.count(".") >= 2:
            stream.close()  # aborts the request and frees its blocks
            break
    print(f"\n[{len(output.outputs[0].token_ids)} tokens]")
    llm.shutdown()


if __name__ == "__main__":
    main()
