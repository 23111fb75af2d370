"""What runs inside vLLM. Read plugin, worker, taps, tables (mirror), router (gates), graphs; then courier (claims, ring, store), and last
cachekey and scheduler."""
