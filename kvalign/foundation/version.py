"""Version of the package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvalign")
except PackageNotFoundError:  # a checkout that is read and not installed
    __version__ = ""
