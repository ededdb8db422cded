"""Effects of burst sampling: ports of this machine, counters, the reading process."""
