"""The paper's figures beside ours: a suite lists them, with the cell of ours that they belong to.

paper:
  source: KV-Align (2024), the authors' logs
  notes: [...]
  tables:
    - title: perplexity, WikiText-103 test
      cell: perplexity-wikitext
      metric: perplexity
      rows: {"kvalign (network)": {32: 134.3, 64: 145.5}}
"""

from typing import Any

from kvalign.errors import UserError
from kvalign.eval.metrics import METRICS
from kvalign.eval.report_tables import Column, Entry, Table
from kvalign.eval.results_folder import Results
from kvalign.eval.rows import method_name


def paper_tables(results: Results) -> list[Table]:
    """A table each: a row a method, and for every cache size the paper's figure and ours; "not run"
    where there is none.
    """
    try:
        return [_beside(own, results) for own in results.suite.get("paper", {}).get("tables", ())]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the suite's entry `paper` is not understood: {error}") from error


def _beside(own: dict[str, Any], results: Results) -> Table:
    name = own["metric"]
    metric = METRICS[name]
    found = {
        (method_name(row), row["cache_size"]): row.get(name)
        for row in results.documents.get(own["cell"], {"rows": []})["rows"]
    }
    sizes = list(dict.fromkeys(size for values in own["rows"].values() for size in values))
    columns = [Column("method")]
    for size in sizes:
        columns += [
            Column(f"C = {size}, paper", True, metric.better),
            Column("ours", True, metric.better, metric.about),
        ]
    lines = []
    for method, values in own["rows"].items():
        line = [Entry(method)]
        for size in sizes:
            ours = found.get((method, size))
            line.append(Entry(metric.text(values.get(size)) or "not run"))
            line.append(Entry(metric.text(ours) or "not run"))
        lines.append(line)
    return Table(own["title"], columns, lines)
