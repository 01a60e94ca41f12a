"""Servers without kvtop's connector: read through the metrics that they publish, and shown as observed."""
