"""A `.steer` bundle: edits as they go from a notebook to a server, with what proves that they still do the same."""
