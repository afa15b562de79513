"""Foundation of all layers, without knowledge of models: errors, settings, files, runs,
progress.
"""
