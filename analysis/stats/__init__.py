"""Numbers with intervals, from the frames of a measurement."""
