"""Inventory of this machine, for the listings and `kvalign doctor`."""
