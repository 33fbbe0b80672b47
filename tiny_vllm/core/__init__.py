"""Control plane: which tokens of which requests run next and which blocks hold their KV.

Pure Python on the base modules; knows nothing of tensors, text or devices.
"""
