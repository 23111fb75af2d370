"""One file a kernel: a torch reference, a Triton body for CUDA, and a bench at the bottom."""
