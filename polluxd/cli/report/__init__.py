"""One self-contained page on a period, and the drawings that it shares with the live page."""
