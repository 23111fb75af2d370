"""What the taps cost, measured against the same engine without them."""
