"""The control cycle, and what a decision is made on."""
