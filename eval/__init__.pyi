from .evaluations.attention import attention as attention
from .evaluations.chat import chat as chat
from .evaluations.latency import latency as latency
from .evaluations.perplexity import perplexity as perplexity
from .evaluations.readability import readability as readability
from .evaluations.recall import recall as recall
from .evaluations.streameval import streameval as streameval
from .report.page import write_report as write_report
