"""Ask for a report three times, for invoices twice, and for three pages with the same chart."""

from __future__ import annotations

from celery import chord
from tasks import chart, invoices, made, page, report

from celery_singleton_lock import DuplicateTask

made.delete("made:report of May", "made:invoices of May", "made:chart of May")

answers = [report.delay("May") for _ in range(3)]
print("duplicates:", [answer.duplicate for answer in answers])
print("results:", {answer.get() for answer in answers})

first = invoices.delay("May")
try:
    invoices.delay("May")
except DuplicateTask as error:
    print("refused, since the first one is not done:", error.task_id == first.id)
first.get()

pages = [chord([chart.si("May") for _ in range(4)], page.s())() for _ in range(3)]
print("pages:", {each.get() for each in pages})

print(
    "made:",
    *(int(made.get(f"made:{what} of May") or 0) for what in ("report", "invoices", "chart")),
)
