from .architectures import FAMILIES as FAMILIES
from .architectures import ModelSpec as ModelSpec
from .architectures import rotation_of as rotation_of
from .architectures import spec_of as spec_of
from .loading import LoadedModel as LoadedModel
from .loading import load_model as load_model
