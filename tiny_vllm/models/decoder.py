"""The dense decoder: embedding, layers, final norm, output projection.

Built in two phases: raw tensors are filled by `DecoderWeights.load`, then `build`
hands them to layers (which may repack them). No global state: `forward` takes all it
needs as arguments.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_vllm.layers.decoder_layer import Attend, DecoderLayer, FusedAttend
from tiny_vllm.models.weight_map import DecoderWeights
from tiny_vllm.ops.linear import Linear, make_linear
from tiny_vllm.ops.norm import rms_norm
from tiny_vllm.ops.rotary import RotaryEmbedding


class Decoder:
    """A loaded model.

    Args:
        weights: filled tensors; consumed, so that packing does not hold two copies.
        max_positions: positions the rotary table covers.
        fused: build the layers for `forward_fused` too (a GPU; Triton kernels).
    """

    def __init__(self, weights: DecoderWeights, max_positions: int, *, fused: bool = False) -> None:
        self.config = config = weights.config
        self.dtype, self.device = weights.dtype, weights.device
        self._embedding = weights.pop("model.embed_tokens.weight")  # [vocab, hidden]
        self._final_norm = weights.pop("model.norm.weight")
        self._rotary = RotaryEmbedding(
            config.head_dim,
            max_positions,
            config.rope_theta,
            config.rope_scaling,
            self.dtype,
            self.device,
        )
        head = self._embedding if config.tie_word_embeddings else weights.pop("lm_head.weight")
        self._make_linear = Linear if fused else make_linear
        self._head = self._make_linear(head)
        self._layers = [self._build_layer(weights, i) for i in range(config.num_layers)]
        self._fused = None
        if fused:
            from tiny_vllm.layers.fused_layer import FusedDecoder  # needs triton

            self._fused = FusedDecoder(
                self._layers, self._final_norm, self._head.weight, config.rms_norm_eps
            )

    def _build_layer(self, weights: DecoderWeights, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}"

        def linear(*names: str) -> Linear:
            return self._make_linear(*weights.pop_stacked(prefix, names))

        # Neighbours in memory: the fused layer reads both as one matrix.
        gate_up, bias = weights.pop_stacked(prefix, ("mlp.gate_proj", "mlp.up_proj"))
        biases = (None, None) if bias is None else bias.chunk(2)
        gate, up = (self._make_linear(w, b) for w, b in zip(gate_up.chunk(2), biases, strict=True))
        qk_norm = self.config.qk_norm
        return DecoderLayer(
            index=index,
            config=self.config,
            rotary=self._rotary,
            input_norm=weights.pop(f"{prefix}.input_layernorm.weight"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=linear("self_attn.o_proj"),
            post_norm=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
            gate=gate,
            up=up,
            down=linear("mlp.down_proj"),
            q_norm=weights.pop(f"{prefix}.self_attn.q_norm.weight") if qk_norm else None,
            k_norm=weights.pop(f"{prefix}.self_attn.k_norm.weight") if qk_norm else None,
        )

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over a flat batch.

        Args:
            input_ids, positions: int64 [T].
            attend: called once a layer; stores K and V and returns the context.

        Returns:
            Hidden states before the final norm, [T, hidden].
        """
        hidden = F.embedding(input_ids, self._embedding)
        cos, sin = self._rotary.gather(positions)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, attend)
        return hidden

    @torch.inference_mode()
    def forward_fused(self, input_ids: Tensor, positions: Tensor, attend: FusedAttend) -> Tensor:
        """As `forward`, in few kernels and safe to capture in a CUDA graph.

        Args:
            input_ids, positions: int [T]; a negative position marks a padded token.
            attend: rotates, stores K and V, attends.
        """
        assert self._fused is not None, "the decoder was built without fused layers"
        hidden = F.embedding(input_ids, self._embedding)
        for layer in self._fused.layers:
            layer(hidden, self._rotary, attend)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Final norm and output projection: [N, hidden] -> float32 [N, vocab].

        ``out`` is where a fused decoder writes them.
        """
        if self._fused is not None:
            return self._fused.logits(hidden, out)
        hidden = rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return self._head(hidden).float()
