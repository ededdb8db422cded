"""Hangs: who did not enter which collective, and whom the others wait for."""
