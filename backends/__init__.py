"""Transfer backends: they move bytes between registered memory regions, and know nothing else."""
