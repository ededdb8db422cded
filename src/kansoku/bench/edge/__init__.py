"""Effects of the benchmarks: launched workers, endpoints, files."""
