"""Attention over a paged KV cache: the prefix-forest planner and its backends."""
