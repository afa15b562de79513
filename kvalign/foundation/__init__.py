"""What all parts stand on and what knows no model: errors, settings, files, runs, progress."""
