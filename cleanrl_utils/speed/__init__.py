"""What exists only for speed: CUDA graphs, background learning, inference in NumPy."""
