"""Banks of which a device has some layers, or a rank some tokens."""
