"""Patching: what one run's values do in another run."""
