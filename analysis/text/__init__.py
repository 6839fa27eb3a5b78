"""What is measured on: text as tokens, contexts, segments, kinds of dependency."""
