"""The gradient noise scale: gradients, their norms, and averages."""
