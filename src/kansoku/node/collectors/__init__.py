"""The built-in collectors, one file each."""
