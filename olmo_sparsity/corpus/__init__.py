"""Token files and what belongs to them: what a prepared corpus is on disk."""
