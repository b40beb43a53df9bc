"""What ties engines to the coordinator without a change in them. Nothing here is imported by the rest."""
