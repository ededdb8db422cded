"""Sockets, clocks and HTTP of the fabric prober."""
