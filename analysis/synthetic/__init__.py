"""The synthetic tasks (docs/method.md, 3): exact match by length, its figures, the bound, coupling, and recall."""
