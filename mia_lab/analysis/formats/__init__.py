"""Vectors and sparse autoencoders in the files of other tools: one module a format, and nothing in them is ever executed."""
