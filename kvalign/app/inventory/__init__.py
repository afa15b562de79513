"""Inventory of this machine: what the listings and `kvalign doctor` know."""
