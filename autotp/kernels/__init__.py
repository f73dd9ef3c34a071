"""Triton kernels, each with a torch.library operator, a fake, its gradient, and a twin in plain PyTorch for CPUs."""
