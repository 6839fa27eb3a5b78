"""Records: what is written and read. Nothing from here on needs torch."""
