"""Effects of the diagnosis: reading bundles of files."""
