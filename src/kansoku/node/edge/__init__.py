"""Effects of the node agent: the real machine, NVML, ethtool, the kernel log, switches, py-spy."""
