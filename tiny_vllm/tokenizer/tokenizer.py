"""One tokenizer interface over the `tokenizers` library.

`decode` is defined by `token_bytes`: the bytes of the tokens, joined, as UTF-8. The
streaming detokenizer reads the same bytes, so both always agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.tokenizer.chat import ChatTemplate
from tiny_vllm.tokenizer.pieces import TokenPieces


class Tokenizer:
    """Text to ids and back for one model.

    Args:
        backend: rules and vocabulary.
        bos_token_id: the beginning-of-text token, None when the model has none.
        eos_token_ids: all tokens that end an output, the main one first.
        chat_template: None when the model has no chat format.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()  # stored settings of a training run must not cut prompts
        backend.no_padding()
        self._backend = backend
        self._pieces = TokenPieces(backend)
        self._chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def strips_leading_space(self) -> bool:
        """True when a text's first space stands for its start (SentencePiece)."""
        return self._pieces.strips_leading_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        Args:
            add_special_tokens: put the model's own (beginning of text) around it. Pass
                False for a rendered chat template, which brings them along.

        Raises:
            InvalidRequestError: not a string, or lone surrogates in it.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"text must be a string, got {type(text).__name__}", "prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"text holds the lone surrogate {text[error.start]!r} at character "
                f"{error.start}, which is no valid Unicode; remove it",
                "prompt",
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have none. Invalid UTF-8 is U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self._pieces[token_id] for token_id in ids if token_id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token adds to a text that has already begun; may be part of a character."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text; incomplete characters show as U+FFFD."""
        return self._pieces[token_id].decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render a conversation as the model was trained to read it.

        Args:
            messages: dictionaries with `role` and `content` (text, or OpenAI text parts).
            add_generation_prompt: end with the opening of the assistant's answer.
            extra: further variables of the template (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequestError: a bad list of messages, or a model without template.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; send a plain prompt instead", "messages"
            )
        return self._chat_template.render(messages, add_generation_prompt, **extra)
