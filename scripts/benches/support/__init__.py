"""What the benches share: a deployment of real processes, and how their cost is read."""
