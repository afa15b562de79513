"""A server, and a conversation through OpenAI's client that sends and feeds only the new turn.

python examples/serve_sessions.py    # needs kvalign[serve], and the package openai
"""

import subprocess
import sys

import openai

command = [sys.executable, "-m", "kvalign", "serve", "--model", "gpt2-mini", "--port", "8124"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
print(server.stdout.readline())  # the address, once the server is ready

client = openai.OpenAI(base_url="http://127.0.0.1:8124/v1", api_key="none", max_retries=8)
for turn in ["Who lived on the island?", "And before them?", "What became of them?"]:
    print(f"> {turn}")
    pieces = client.chat.completions.create(
        model="gpt2-mini",
        messages=[{"role": "user", "content": turn}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"session": "island"},
    )
    for piece in pieces:
        print(piece.choices[0].delta.content or "" if piece.choices else "", end="", flush=True)
    known = piece.usage.prompt_tokens_details.cached_tokens
    print(f"\n[{piece.usage.prompt_tokens} prompt tokens, {known} of them in the session]\n")
client.close()
server.terminate()
server.wait()
server.stdout.close()
