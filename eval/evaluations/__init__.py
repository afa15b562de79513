"""The evaluations: a line each."""

EVALUATIONS = {
    "perplexity": "compare methods on perplexity and time",
    "latency": "time per token of all methods, taking turns",
    "readability": "let methods write, and judge what they wrote",
    "streameval": "ask for values registered some lines back in an endless stream",
    "chat": "many conversations through one stream, each answer judged",
}
