"""The gradient noise scale: gradients observed, reduced to norms, averaged."""
