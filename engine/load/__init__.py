"""From a name and options to weights in memory and a plan."""
