"""A folder of results as one page, in a browser or in a terminal."""
