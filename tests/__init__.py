"""The tests; a package, so that they can import what is in ``tests.support``."""
