"""`kvalign methods`, `policies`, `aligners`, `corpora`: tables of choices."""

from dataclasses import dataclass, make_dataclass
from typing import Any

from kvalign.foundation.settings import Settings, option

_ABOUT = {
    "methods": (
        "List the ways to stream, which are the values of --method (--policy: kvalign policies)."
    ),
    "policies": "List the policies, which choose the entries to evict: the values of --policy.",
    "aligners": "List the shipped aligners and those of the hub's cache: for which model, of which "
    "kind,\ntrained on what. What --aligner takes, beside the folder of one.",
    "corpora": "List the texts to train and evaluate on, which are the values of --corpus.",
}
LISTINGS = tuple(_ABOUT)
_OF_MODEL = option(None, help="only those for this model: shipped name, hub id or folder")
_FIELDS: dict[str, list] = {"aligners": [("model", str | None, _OF_MODEL)]}


@dataclass
class ListingCommand:
    """Adapter: one kind of choices as a command's function."""

    name: str

    @property
    def settings(self) -> type[Settings]:
        about = f"{_ABOUT[self.name]}\n\nExample:\n    kvalign {self.name}\n"
        name, namespace = f"{self.name.title()}Settings", {"__doc__": about}
        return make_dataclass(
            name,
            _FIELDS.get(self.name, ()),
            bases=(Settings,),
            namespace=namespace,
            frozen=True,
            kw_only=True,
        )

    def __call__(self, settings: Settings, as_json: bool) -> dict[str, Any]:
        from kvalign.app import listing

        rows = getattr(listing, self.name)(**vars(settings))
        return listing.show(as_json, **{self.name: rows})
