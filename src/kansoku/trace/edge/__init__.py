"""Effects of the trace package: sockets."""
