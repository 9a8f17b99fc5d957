"""How fast, how fair, how many round trips: see README.md in this folder."""
