"""Steppers: decode steps that are faster than a call of the model."""
