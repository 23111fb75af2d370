"""What a Session shows and opens in a notebook; the work is done in `show/` and `widgets/`."""
