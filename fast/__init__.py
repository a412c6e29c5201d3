"""Optional: the same computation faster, with --fast. Without this folder nothing else changes."""

from fast.shortcuts import speed_up as speed_up
