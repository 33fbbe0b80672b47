"""Weights from a GGUF file: dequantised, renamed and put in Hugging Face's row order.

Quantised tensors come out as float32, others as stored. Memory: one tensor at a time,
its stored bytes read in slices of rows.
"""

import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from tiny_vllm.errors import ModelLoadError
from tiny_vllm.gguf_header import GgufHeader, GgufTensor
from tiny_vllm.weights.gguf_config import (
    hf_config_from_gguf,
    num_bytes,
    open_gguf,
    storage_type,
)

_STORED = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTISED = {
    GGMLQuantizationType[name]
    for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
}
_SLICE_BYTES = 4 << 20  # of stored data dequantised at once

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_FOLDED = ("rope_freqs.weight",)  # part of the config


class GgufWeights:
    """Reads the weights of a GGUF file; see `WeightSource`."""

    def __init__(self, path: Path) -> None:
        self._header = open_gguf(path)
        self.config = hf_config_from_gguf(self._header)
        kept = [tensor for tensor in self._header.tensors if tensor.name not in _FOLDED]
        self._entries = [(hf_name(self._header, tensor), tensor) for tensor in kept]
        for tensor in kept:
            _check_storage(self._header, tensor)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._header.path.open("rb") as file:
            for name, entry in self._entries:
                yield name, self._restore_rows(entry.name, _read(file, self._header, entry))

    def _restore_rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the converter's row order of q and k, which only `llama` files have.

        There, rotary pairs (i, i + head_dim / 2) of each head are stored side by side.
        """
        part = name.split(".")[-2]
        if self._header.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        num_rows, num_heads = tensor.shape[0], self.config[heads]
        if num_rows != num_heads * self.config["head_dim"]:
            raise ModelLoadError(
                f"{self._header.path}: tensor {name!r} has {num_rows} rows, expected "
                f"{num_heads} heads x {self.config['head_dim']}"
            )
        pairs = tensor.view(num_heads, num_rows // num_heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def hf_name(header: GgufHeader, tensor: GgufTensor) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        ModelLoadError: a tensor the supported families do not have.
    """
    match = _NAME.fullmatch(tensor.name)
    if match and match["layer"] is None and match["part"] in _TOP_NAMES:
        return f"{_TOP_NAMES[match['part']]}.{match['kind']}"
    if match and match["layer"] is not None and match["part"] in _LAYER_NAMES:
        part = _LAYER_NAMES[match["part"]]
        return f"model.layers.{match['layer']}.{part}.{match['kind']}"
    raise ModelLoadError(
        f"{header.path}: tensor {tensor.name!r} has no place in a dense "
        f"{header.architecture!r} decoder"
    )


def _check_storage(header: GgufHeader, tensor: GgufTensor) -> None:
    kind = storage_type(header, tensor)
    if kind not in _STORED and kind not in _QUANTISED:
        known = ", ".join(sorted(k.name for k in (*_STORED, *_QUANTISED)))
        raise ModelLoadError(
            f"{header.path}: tensor {tensor.name!r} is stored as {kind.name}, which cannot be "
            f"read; supported are {known}"
        )


def _read(file: BufferedReader, header: GgufHeader, tensor: GgufTensor) -> torch.Tensor:
    kind = storage_type(header, tensor)
    file.seek(tensor.offset)
    if kind in _STORED:
        out = torch.empty(tensor.shape, dtype=_STORED[kind])
        _fill(file, header, tensor, out.view(torch.uint8).numpy())
        return out
    out = torch.empty(tensor.shape, dtype=torch.float32)
    rows = out.view(-1, tensor.shape[-1]).numpy()
    row_bytes = num_bytes(header, tensor) // len(rows)
    step = max(1, _SLICE_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        raw = np.empty((min(step, len(rows) - start), row_bytes), dtype=np.uint8)
        _fill(file, header, tensor, raw)
        rows[start : start + step] = dequantize(raw, kind)
    return out


def _fill(file: BufferedReader, header: GgufHeader, tensor: GgufTensor, target: np.ndarray) -> None:
    found = file.readinto(target.reshape(-1).data)
    if found != target.nbytes:
        raise ModelLoadError(
            f"{header.path} is truncated in tensor {tensor.name!r}: expected {target.nbytes} "
            f"bytes, found {found}; download it again"
        )
