"""Figures of Results and of other frames of numbers: no model, no torch."""
