"""Tracing: code that reads and writes values, recorded and then run as edits and captures."""
