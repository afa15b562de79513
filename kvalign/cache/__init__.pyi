from .sizes import CacheSizes as CacheSizes
from .streaming_cache import StreamingCache as StreamingCache
