"""Text of the baseline's requests, or none where the engine runs without a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.models.loader import LoadedModel
from tiny_vllm.outputs import Logprob, TokenLogprobs
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import StreamingDetokenizer, Tokenizer, load_tokenizer


class TextStream(Protocol):
    """Turns output tokens into text as they come and finds the stop strings among them."""

    def append(self, token_id: int) -> str | None:
        """Take one token; return the stop string that it completed, if any."""
        ...

    def take(self) -> str:
        """Text that became visible since the last call."""
        ...

    def name_tokens(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Log-probabilities with the text of each token, where there is text."""
        ...

    def finish(self) -> None:
        """The output ends here: show what was held back."""
        ...


class NoText:
    """Stands in for a detokenizer where there is no tokenizer."""

    def append(self, token_id: int) -> str | None:
        return None

    def take(self) -> str:
        return ""

    def name_tokens(self, entry: TokenLogprobs) -> TokenLogprobs:
        return entry

    def finish(self) -> None:
        pass


class Detokenized:
    """The shared streaming detokenizer, one token at a time."""

    def __init__(self, tokenizer: Tokenizer, stream: StreamingDetokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, stream

    def append(self, token_id: int) -> str | None:
        match = self._stream.append([token_id])
        return None if match is None else match.stop

    def take(self) -> str:
        return self._stream.take()

    def name_tokens(self, entry: TokenLogprobs) -> TokenLogprobs:
        name = self._tokenizer.token_text
        return {i: Logprob(p.logprob, p.rank, name(i)) for i, p in entry.items()}

    def finish(self) -> None:
        self._stream.finish()


@dataclass(frozen=True, slots=True)
class TextFactory:
    """Makes the text stream of a request."""

    tokenizer: Tokenizer | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What the tokenizer calls end of sequence, beside what the model's config does."""
        return () if self.tokenizer is None else self.tokenizer.eos_token_ids

    @classmethod
    def load(cls, loaded: LoadedModel) -> "TextFactory":
        """The model's tokenizer; none with ``skip_tokenizer_init`` or where it ships none.

        Raises:
            ModelLoadError: the model has no tokenizer that can be read.
        """
        config = loaded.config
        if config.skip_tokenizer_init or not (config.tokenizer or loaded.files.has_tokenizer):
            return cls()
        return cls(load_tokenizer(loaded.files, config.tokenizer, config.revision))

    def make(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
        """Raises InvalidRequestError: stop strings, which cannot be found without text."""
        if self.tokenizer is not None:
            stream = StreamingDetokenizer(
                self.tokenizer,
                prompt_token_ids,
                params.stop_strings,
                params.include_stop_str_in_output,
                params.skip_special_tokens,
                params.min_tokens,
            )
            return Detokenized(self.tokenizer, stream)
        if params.stop_strings:
            raise InvalidRequestError(
                f"stop={params.stop!r} needs text, and the engine runs without a tokenizer; "
                f"name one (tokenizer=...) or use stop_token_ids",
                "stop",
            )
        return NoText()
