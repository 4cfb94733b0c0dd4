"""The process that owns layers: what runs next on the device, and what sessions have cached."""
