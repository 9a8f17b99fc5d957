"""Sell 50 lamps and 50 chairs to 200 buyers, first without and then with the lock."""

from __future__ import annotations

from celery import Task, group
from tasks import buy, buy_unlocked, database, open_shop

STOCK = {"lamp": 50, "chair": 50}
BUYERS = 200


def sale(task: Task) -> dict[str, int]:
    """Return product -> units sold that were not in stock."""
    open_shop(STOCK)
    products = list(STOCK)
    orders = [task.s(products[buyer % len(products)], buyer) for buyer in range(BUYERS)]
    group(orders).apply_async().get(timeout=60)
    with database() as db:
        sold = dict(db.execute("SELECT product, count(*) FROM sales GROUP BY product"))
    return {product: sold[product] - items for product, items in STOCK.items()}


if __name__ == "__main__":
    for task in buy_unlocked, buy:
        print(f"{task.name:20} oversold by {sale(task)}")
