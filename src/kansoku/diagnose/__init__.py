"""Diagnosis: evidence to ranked causes to actions. Import the modules; effects live in ``edge``."""
