from .architectures import FAMILIES as FAMILIES
from .architectures import LoadedModel as LoadedModel
from .architectures import ModelSpec as ModelSpec
from .architectures import load_model as load_model
from .architectures import rotation_of as rotation_of
from .architectures import spec_of as spec_of
