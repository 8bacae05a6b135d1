"""The device of a section of the GPU check, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.floor import Rates, measure_rates

# the deepest context and the longest prompt of a rehearsal: beyond the budget, within seconds
REHEARSED, READ = 32768, 4096


@dataclass
class Context:
    """The device of a section, whether shapes are small, the seconds it may take, and where it
    notes its facts so far.
    """

    device: str
    small: bool
    seconds: float
    note: object = lambda facts: None
    rates: Rates | None = None

    @property
    def shape(self):
        """The model shape that is timed."""
        return "tiny" if self.small else "llama-3-8b"

    @property
    def dtype(self):
        """Its dtype."""
        return "bfloat16"

    def within(self, sizes, most=REHEARSED):
        """Those contexts or prompts that are run here: in a rehearsal none above `most`."""
        return tuple(n for n in sizes if not self.small or n <= most)

    def measured(self):
        """Rates of this device, measured once per section process."""
        if self.rates is None:
            self.rates = measure_rates(
                self.device, 2**24 if self.small else None, seconds=0.1 if self.small else 1.0
            )
        return self.rates
