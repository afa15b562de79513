from .corpora import texts as texts
from .corpora import token_pieces as token_pieces
from .corpus import conversations as conversations
from .recording import record as record
from .store import Store as Store
from .store import open_store as open_store
