"""What all evaluations share: settings, the grid of methods, the document of results."""
