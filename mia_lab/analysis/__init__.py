"""From prompts to vectors and results."""
