"""Records to numbers with intervals."""
