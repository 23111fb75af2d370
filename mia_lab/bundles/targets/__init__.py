"""Edits in the formats of other tools and servers: one module a format, and nothing in a file is ever executed."""
