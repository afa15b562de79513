"""`kvalign doctor`: what is installed, reachable and at hand here."""

from dataclasses import dataclass

from kvalign.foundation.settings import Settings


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Settings):
    """Show what is installed, reachable and at hand here, and what to do about the rest.

    A thing is ok, missing (KV-Align works without it) or wrong (it is here and cannot be used).
    Nothing is fetched. Exit code 1: something that is required is missing or wrong.

    Example:
        kvalign doctor
    """


SETTINGS = DoctorSettings


def run(settings: DoctorSettings, as_json: bool) -> None:
    import dataclasses
    import json

    from kvalign.app.inventory.doctor import examine, is_fit, show

    checks = examine()
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"fit": is_fit(checks), "checks": rows}))
    else:
        show(checks)
    if not is_fit(checks):
        raise SystemExit(1)
