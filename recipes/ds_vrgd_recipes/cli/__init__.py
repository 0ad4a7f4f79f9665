"""``ds-vrgd-recipes``: one module per subcommand."""
