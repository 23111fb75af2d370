"""From a batch of prompts to a running engine, and what it captured back."""
