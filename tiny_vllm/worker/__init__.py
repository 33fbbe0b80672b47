"""The data plane: KV tensors, the input batch and the model runner."""
