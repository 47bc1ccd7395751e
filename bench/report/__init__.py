"""From results files to what a person reads. Imports no torch."""
