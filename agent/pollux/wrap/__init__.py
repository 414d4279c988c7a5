"""Let polluxd schedule a trainer whose loop nobody will change: `pollux wrap`."""
