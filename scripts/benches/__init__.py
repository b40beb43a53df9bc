"""The measurements: one module for each bench, found by its name."""
