"""Derive the test vectors. Run `python -m generate` in the folder above this one."""
