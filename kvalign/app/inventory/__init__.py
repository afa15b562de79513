"""What is at hand here: what the listings and `kvalign doctor` know."""
