"""`axolotl` prints its logo before any command; this way JSON comes alone."""

from . import protrain

protrain(prog_name="axolotl protrain")
