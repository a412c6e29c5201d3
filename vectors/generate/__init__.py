"""Derives the test vectors: `python -m generate` from the folder that holds this one."""
