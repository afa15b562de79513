"""Pages that show what the toolkit does."""
