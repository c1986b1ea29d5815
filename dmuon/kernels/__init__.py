"""Orthogonalization kernels: they know tensors and devices, and nothing of ranks or optimizers."""
