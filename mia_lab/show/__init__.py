"""Views: one intermediate form of parts, lowered to text and to HTML, so the two never disagree."""
