"""Methods that keep everything and choose tokens by an index of K on the device."""
