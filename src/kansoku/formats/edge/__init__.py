"""Effects of the readers: parts of them that this machine compiles."""
