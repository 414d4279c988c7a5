"""`pollux run`: one launcher per node, one worker per GPU."""
