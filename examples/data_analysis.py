"""Analyse a table with pandas and draw charts. Install: pip install .

The code runs cell by cell in a Python that keeps its variables, as in a notebook. Charts come back
as PNG, written to the current folder, and as numbers for models that read only text. The image
"data" (pandas, matplotlib, ...) is built with the first run: half a minute, and once.
"""

import csv
import io
import json
import random
from pathlib import Path

from hutch import Execution, Sandbox

# A model would write these, and get the result of each. The second has a mistake.
CELLS = [
    "import pandas as pd\nsales = pd.read_csv('sales.csv', parse_dates=['day'])\nsales.describe()",
    "sales.groupby('shop').revenu.sum()",
    "sales.groupby('shop').revenue.sum()",
    """
import matplotlib.pyplot as plt
monthly = sales.groupby(sales.day.dt.month).revenue.sum()
plt.bar(monthly.index, monthly)
plt.title("Revenue by month")
plt.show()
""",
]


def make_table(rows: int) -> str:
    """Some sales of a year, as CSV."""
    generator = random.Random(1)
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["day", "shop", "revenue"])
    for _ in range(rows):
        day = f"2025-{generator.randint(1, 12):02}-{generator.randint(1, 28):02}"
        shop = generator.choice(["Lyon", "Oslo", "Turin"])
        writer.writerow([day, shop, generator.randint(1, 500)])
    return file.getvalue()


def show(number: int, execution: Execution) -> None:
    """Print what a model would get, and save the pictures."""
    print(f"\ncell {number}: {execution.duration_ms} ms {execution.logs.stdout}")
    if execution.died:
        print(f"the Python ended ({execution.died}): its variables are gone")
    elif execution.timed_out:
        print("stopped: it took too long; its variables are kept")
    elif execution.error:
        print(f"{execution.error.name}: {execution.error.value}")
    for result in execution.results:
        if result.png:
            path = Path(f"chart-{number}.png")
            path.write_bytes(result.bytes_of("png"))
            print(f"wrote {path}: {json.dumps(result.chart)}")
        else:
            print(result.text)


def main() -> None:
    with Sandbox.create(image="data", memory="2g") as box:
        box.files.write("sales.csv", make_table(rows=2000))
        for number, code in enumerate(CELLS, start=1):
            show(number, box.run_code(code, timeout=60))


if __name__ == "__main__":
    main()
