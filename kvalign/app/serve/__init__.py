"""`kvalign serve`: many endless streams of one model, behind the interface of OpenAI's API."""
