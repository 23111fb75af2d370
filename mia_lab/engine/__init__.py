"""What runs inside vLLM. Read plugin, worker, taps, tables, router, courier, then cachekey and scheduler."""
