"""Copies of data sets of the hub, in its layout."""

from pathlib import Path
from typing import Any

from pyarrow import Table, parquet


def write_data_set(folder: Path, config: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    """Rows of each split of a config, and the card that says where they are."""
    (folder / config).mkdir(parents=True)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for split, rows in splits.items():
        parquet.write_table(Table.from_pylist(rows), folder / config / f"{split}-00000.parquet")
        card += f"  - split: {split}\n    path: {config}/{split}-*\n"
    (folder / "README.md").write_text(f"{card}---\n")
