"""Derives the test vectors: `python -m vectors.generate` from the folder that holds vectors/."""
