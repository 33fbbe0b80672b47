"""Tensor operations, each as its plain-torch definition and, where it pays, a faster twin."""
