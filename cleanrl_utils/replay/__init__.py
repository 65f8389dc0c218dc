"""Replay memory, in torch and in JAX."""
