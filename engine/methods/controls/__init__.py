"""Controls and ablations: what a comparison must be able to fail against."""
