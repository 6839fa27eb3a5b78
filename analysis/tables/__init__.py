"""Tables for a terminal: numbers with their 95 % intervals, from results as JSON."""
