"""Programs that time one part each."""
