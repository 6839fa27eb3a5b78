"""The configuration of a run: its fields, how it is loaded, and what is checked before anything starts."""
