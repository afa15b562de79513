"""`window`: keep the last C entries and no sinks, the baseline of the StreamingLLM paper."""

from kvalign.methods.streaming_llm import StreamingLLM


class Window(StreamingLLM):
    name = "window"
    about = "keeps the last entries, no sinks"
    default_num_sinks = 0
    fixed = ("num_sinks",)
