"""The model's tokenizer as a workload needs it; loaded only for text prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiny_vllm.hub import resolve_model

if TYPE_CHECKING:
    from tiny_vllm.tokenizer import Tokenizer


class ModelEncoder:
    """Implements `workloads.PromptEncoder`."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(
        cls, model: str, tokenizer: str | None = None, revision: str | None = None
    ) -> "ModelEncoder":
        """Load the tokenizer of ``model``, or the one that ``tokenizer`` refers to.

        Raises:
            ModelLoadError: the model has none.
        """
        from tiny_vllm.tokenizer import load_tokenizer

        return cls(load_tokenizer(resolve_model(model, revision), tokenizer))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a chat, up to where the answer begins; plain text for a base model."""
        if not self._tokenizer.has_chat_template:
            return self.encode("\n\n".join(message["content"] for message in messages))
        text = self._tokenizer.apply_chat_template(messages)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """The text of one token."""
        return self._tokenizer.token_text(token_id)
