"""mutmut, with each mutant in a process that has imported nothing of the package before.

What runs as a module is imported (a check that is made there, a table, a cache that is filled) has
run before mutmut switches a mutant on, if all mutants share what was imported once. That is quick,
and enough for most; what survives so is played once more like this.
"""

from __future__ import annotations

from mutmut.__main__ import cli
from mutmut.configuration import ForkServerWarmup, config

if __name__ == "__main__":
    config().forkserver_warmup = ForkServerWarmup.NONE
    cli()
