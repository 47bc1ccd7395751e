"""From records to figures. Imports no torch."""
