"""What the task works on."""

from django.db import models


class Entry(models.Model):
    """A line of an account."""

    account = models.CharField(max_length=50)
    amount = models.IntegerField()
    fence = models.BigIntegerField(default=0)

    def __str__(self):
        return f"{self.account}: {self.amount}"
