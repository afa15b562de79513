"""Two replicas of a server at one address. Each session goes to the replica that has its cache.

python examples/serve_on_ray.py    # needs kvalign[serve] and ray[serve]
"""

import openai
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from kvalign.app.serve.settings import ServeSettings


def application():
    """Application of each replica, built where it runs."""
    from kvalign.app.serve.server import build

    settings = ServeSettings(model="gpt2-mini", cache_size=64)
    return build(settings, settings.load())


replicas = serve.deployment(
    serve.ingress(application)(),
    name="kvalign",
    num_replicas=2,
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
)
serve.start(http_options={"port": 8123})
serve.run(replicas.bind())

client = openai.OpenAI(base_url="http://127.0.0.1:8123/v1", api_key="none")
for turn in ["Who lived there?", "Why?", "And before them?"]:
    for session in ["one", "two", "three", "four"]:  # the header chooses the replica
        reply = client.with_options(default_headers={"X-Session-Id": session}).chat.completions
        usage = reply.create(
            model="gpt2-mini", messages=[{"role": "user", "content": turn}], max_tokens=12
        ).usage
        print(f"{session}: {usage.prompt_tokens_details.cached_tokens} tokens came from the cache")
ray.shutdown()
