"""Documented import paths; the code of an operation is in its own folder."""
