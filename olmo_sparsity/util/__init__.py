"""What every stage uses: errors, files, locks, progress, provenance."""
