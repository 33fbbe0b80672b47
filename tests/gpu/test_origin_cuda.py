"""The baseline on CUDA: fused kernels in every case, and the CPU's draws."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_vllm.config import ModelConfig
from tiny_vllm.origin.attention import DecodeAttention, PrefillAttention
from tiny_vllm.origin.kv_cache import ContiguousKvCache
from tiny_vllm.sampler import Sampler, SamplingRow, make_generator
from tiny_vllm.sampling_params import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[301, 301, 301], [301, 77, 214]])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_takes_a_fused_kernel_and_equals_the_cpu(dtype, lengths, window):
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=512,
        intermediate_size=8,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        sliding_window=window,
    )
    outputs = {}
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(1)
        cache = ContiguousKvCache(model, 4, 512, dtype, torch.device(device))

        def qkv(count, generator=generator, device=device):
            shapes = [(count, heads, 64) for heads in (8, 2, 2)]
            return (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)

        found = []
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            for slot, length in enumerate(lengths):
                found.append(PrefillAttention(cache, model, slot)(0, *qkv(length - 1)))
            found.append(DecodeAttention(cache, model, lengths)(0, *qkv(3)))
        outputs[device] = [out.float().cpu() for out in found]
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for cpu, cuda in zip(outputs["cpu"], outputs["cuda"], strict=True):
        torch.testing.assert_close(cuda, cpu, atol=tolerance, rtol=tolerance)


def test_a_seed_draws_the_same_tokens_as_on_the_cpu():
    generator = make_generator(0)
    logits = torch.randn(32, 50000, generator=generator) * 3
    params = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0}]
    rows = [
        SamplingRow(SamplingParams(**params[i % 5]), [1], [2], generator=make_generator(i))
        for i in range(32)
    ]
    assert Sampler().sample(logits.cuda(), rows) == Sampler().sample(logits, rows)


def test_ties_go_to_the_lowest_id_and_bad_rows_are_errors():
    logits = torch.randint(0, 3, (8, 128256), generator=make_generator(1)).float()
    assert torch.equal(logits.cuda().argmax(-1).cpu(), logits.argmax(-1))
    logits[0, 5], logits[1] = float("nan"), -float("inf")
    rows = [SamplingRow(SamplingParams(temperature=0), [1], []) for _ in range(8)]
    results = Sampler().sample(logits.cuda(), rows)
    assert [type(r).__name__ for r in results] == ["SampleError"] * 2 + ["SampledToken"] * 6
