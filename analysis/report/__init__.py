"""Numbers and examples to pages."""
