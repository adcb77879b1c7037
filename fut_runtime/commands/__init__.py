"""The commands of `fut-run`, one a module."""
