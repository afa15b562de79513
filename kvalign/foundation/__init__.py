"""Foundation of all parts, which knows no model: errors, settings, files, runs, progress."""
