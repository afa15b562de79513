"""Fields of a part of a request: obeyed, harmless, refused by name, or ignored."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationInfo, model_validator

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.other_apis import REFUSED

_MOST_IGNORED = 20  # names that are told


class Form(BaseModel, extra="forbid", strict=True):
    """Part of a request. Each field that an API has is obeyed, is harmless, or is refused by name,
    and so is a `type` that is not known. A name that no API has is ignored, and noted in the list
    `ignored` of pydantic's context.

    Attributes:
        harmless: fields that change no token of an answer, and what they are for.
        refused: fields that would change an answer, and the values that ask for nothing of them.
        within: field of the request that has this part.
    """

    harmless: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    within: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _only_obeyed(cls, values: Any, info: ValidationInfo) -> Any:
        ignored = (info.context or {}).get("ignored", [])
        return cls.obeyed(values, ignored) if isinstance(values, dict) else values

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """Return the fields that are obeyed, and note those that are ignored; RequestError for one
        that is refused.
        """
        refused = {**REFUSED, **cls.refused}
        where, fields = f"{cls.within}: " if cls.within else "", {}
        kind, kinds = values.get("type"), cls._kinds()
        if isinstance(kind, str) and kinds and kind not in kinds:
            raise RequestError(
                f"{where}the type {kind!r:.80} is not supported, only {' and '.join(kinds)}",
                param=cls.within,
                code="unsupported",
            )
        for name, value in values.items():
            if name in cls.model_fields:
                fields[name] = value
            elif name in cls.harmless:
                continue
            elif name in refused:
                if value is not None and value not in refused[name]:
                    raise RequestError(
                        f"{where}{name} is not supported: leave it out",
                        param=cls.within or name,
                        code="unsupported",
                    )
            elif len(ignored) < _MOST_IGNORED and f"{where}{name}" not in ignored:
                ignored.append(f"{where}{name}")
        return fields

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        """Return the values that the field `type` may have; none without one."""
        field = cls.model_fields.get("type")
        return get_args(field.annotation) if field else ()
