"""``ds-vrgd doctor``: a user's configuration, compared with the dense float64 reference."""
