"""What draws results."""
