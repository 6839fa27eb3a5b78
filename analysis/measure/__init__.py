"""Measurements: a model and a text in, records out."""
