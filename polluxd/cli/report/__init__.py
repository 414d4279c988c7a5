"""What happened in a period; and the drawings of the live page."""
