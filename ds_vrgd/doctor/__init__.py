"""``ds-vrgd doctor``: a user's configuration held against the dense float64 reference."""
