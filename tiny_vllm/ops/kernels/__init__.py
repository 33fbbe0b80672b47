"""Triton kernels. Each computes what its plain-torch twin in `tiny_vllm.ops` defines."""
