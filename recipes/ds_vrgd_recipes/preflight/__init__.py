"""A look over a cluster before a training starts on it."""
