"""Sweeps: from a vector to a setting that can be trusted, and what was measured on the way."""
