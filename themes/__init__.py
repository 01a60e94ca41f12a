"""Colour themes as TOML data."""
