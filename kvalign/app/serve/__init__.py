"""`kvalign serve`: many endless streams of one model, behind the OpenAI API."""
