"""Data loaders whose position survives any change of ranks and batch size."""
