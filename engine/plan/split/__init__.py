"""A model's layers over several devices: where they are cut, and what each part is."""
