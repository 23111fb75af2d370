"""Notebook controls: thin ipywidgets over the session, each with a twin HTML output that outlives the kernel."""
