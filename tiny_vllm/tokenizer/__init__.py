"""Text to token ids and back: encode, streaming decode with stop strings, chat template.

No torch. A tokenizer is built from a Hugging Face folder or from GGUF metadata; both end
in the same `Tokenizer`.
"""

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.hub import ModelFiles, ModelKind, resolve_model
from tiny_vllm.tokenizer.detokenizer import StopMatch, StreamingDetokenizer
from tiny_vllm.tokenizer.tokenizer import Tokenizer

__all__ = ["StopMatch", "StreamingDetokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(
    files: ModelFiles, override: str | None = None, revision: str | None = None
) -> Tokenizer:
    """Build the tokenizer of a model, or of the model reference ``override``.

    Args:
        revision: of ``override``, when that is a Hugging Face id.

    Raises:
        ModelLoadError: no tokenizer there, or one that is not supported.
    """
    if override:
        files = resolve_model(override, revision, tokenizer_only=True)
    if files.kind is ModelKind.PRESET:
        raise ModelLoadError(
            f"{files.name!r} is only a shape, without a tokenizer: name another one "
            "(tokenizer=...) or use token ids only (skip_tokenizer_init)"
        )
    if files.kind is ModelKind.GGUF:
        from tiny_vllm.tokenizer.gguf_vocab import tokenizer_from_gguf

        return tokenizer_from_gguf(files.location)
    from tiny_vllm.tokenizer.hf_folder import tokenizer_from_folder

    return tokenizer_from_folder(files.location)
