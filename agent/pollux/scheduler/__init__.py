"""The connection to polluxd: reports out, instructions in."""
