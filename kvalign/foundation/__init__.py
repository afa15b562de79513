"""Foundation, without knowledge of models: errors, settings, registry, files, runs, progress."""
