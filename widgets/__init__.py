"""Notebook controls, and the scripts and styles that views inline."""
