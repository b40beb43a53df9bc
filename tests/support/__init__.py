"""What tests of several areas use."""
